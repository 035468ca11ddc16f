"""The errors a user can mend, and the exit codes a command ends with."""

EXIT_USER_ERROR = 2
EXIT_DOES_NOT_FIT = 3
"""A plan's: the run does not fit its devices."""


class UserError(ValueError):
    """Something in the user's input cannot work; the message says what to change.

    Commands print the message alone, without a traceback, and exit with `EXIT_USER_ERROR`.
    """


class WeightsError(UserError):
    """A weights folder does not hold the model it should; the message names the tensor or file."""


class OutOfMemoryError(UserError):
    """Devices ran out of memory; the message has the plan's numbers and the setting to change."""


class RewardError(UserError):
    """A reward function broke its contract; the message names the function."""


class PeerError(UserError):
    """Another process of the run failed; the message says which one, and with what."""
