"""The errors a user can mend, and the exit codes a command ends with."""

EXIT_USER_ERROR = 2


class UserError(ValueError):
    """Something in the user's input cannot work; the message says what to change.

    Commands print the message alone, without a traceback, and exit with `EXIT_USER_ERROR`.
    """


class WeightsError(UserError):
    """A weights folder does not hold the model it should; the message names the tensor or file."""


class RewardError(UserError):
    """A reward function broke its contract; the message names the function."""


class PeerError(UserError):
    """Another process of the run failed; the message says which one, and with what."""
