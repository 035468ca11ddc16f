"""Errors that a user can fix, and the exit codes of commands."""

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

EXIT_FAULT = 1
"""Exit code of a run that failed."""
EXIT_USER_ERROR = 2
EXIT_DOES_NOT_FIT = 3
"""Exit code of a plan whose run does not fit its devices."""
EXIT_INTERRUPTED = 130
"""Exit code after Ctrl-C, the second one if the first was to end after the step."""
EXIT_PIPE_CLOSED = 141
"""Exit code where nobody reads the output any more: 128 and the number of SIGPIPE."""
EXIT_PREEMPTED = 75
"""Exit code of a run that was asked to stop: the same command continues it (`EX_TEMPFAIL`)."""


def first_line(error: Exception) -> str:
    """Returns the first line of an error's message, to be quoted in one of our own."""
    return (str(error).strip() or "no reason given").splitlines()[0]


class UserError(ValueError):
    """Something in the user's input cannot work; the message says what to change.

    Commands print the message alone, without a traceback, and exit with `EXIT_USER_ERROR`.
    """


class FileError(UserError):
    """A file cannot be read; the message names it, what is wrong, and the fix."""


class WeightsError(UserError):
    """A weights folder does not hold the expected model; the message names the tensor or file."""


class OutOfMemoryError(UserError):
    """Devices ran out of memory; the message has the plan's numbers and the setting to change."""


class RewardError(UserError):
    """A reward function broke its contract; the message names the function."""


class MissingAttributeError(UserError, AttributeError):
    """An object has no attribute that another library's has; the message says what to use."""


class PeerError(UserError):
    """Another process found that the input cannot work; the message says which one, and why."""


class RunError(RuntimeError):
    """A run cannot continue, through no fault of its input; the message says what to try.

    Commands print the message alone, without a traceback, and exit with `EXIT_FAULT`.
    """


class CallbackError(RunError):
    """A callback raised an error, its cause; the message names the callback and the event."""


class PlanningError(RunError):
    """The process that compiles for a plan failed; the message has its last lines."""


class PeerRunError(RunError):
    """Another process of the run failed; the message says which one, and with which error."""


class RewardFailureError(RewardError, RunError):
    """A reward function failed on a completion; the message names both.

    It may pass the next time, as with a service that did not answer, so the exit code is
    `EXIT_FAULT`.
    """


def exit_code(error: UserError | RunError) -> int:
    """Returns the exit code of a command that an error ends."""
    return EXIT_FAULT if isinstance(error, RunError) else EXIT_USER_ERROR


def refuse_all(*checks: Callable[[], object]) -> None:
    """Makes all checks, and raises one `UserError` for all that they refuse."""
    refusals = []
    for check in checks:
        try:
            check()
        except UserError as error:
            refusals.append(str(error))
    if refusals:
        raise UserError(" ".join(refusals))


def refuse_unknown(function: str, names: Iterable[str], advice: Mapping[str, str]) -> None:
    """Raises `UserError` for arguments that a function does not have, with advice by name."""
    answers = [
        f"{function} has no argument {name}: {advice.get(name, 'its docstring lists all')}."
        for name in names
    ]
    if answers:
        raise UserError(" ".join(answers))


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Returns " (did you mean NAME?)", with the nearest of known names; "" where none is near."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return f" (did you mean {near[0]}?)" if near else ""


def listed(names: Sequence[str], word: str = "and") -> str:
    """Returns one or more names as a sentence lists them: "a", "a and b", or "a, b and c"."""
    *first, last = names
    return f"{', '.join(first)} {word} {last}" if first else last


def without_repetition(pairs: Sequence[tuple[Any, Any]]) -> dict[Any, Any]:
    """Returns a dict; raises `UserError` for a name that occurs twice."""
    found = {}
    for name, value in pairs:
        if name in found:
            raise UserError(f"{name} is set twice: leave out one of them.")
        found[name] = value
    return found
