"""Errors that a user can fix, and the exit codes of commands."""

import difflib
import os
import re
import reprlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from grpo_eqx.common.clean_text import clean

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


_LONGEST_LINE = 500
_LONGEST_VALUE = 80
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _LONGEST_VALUE - 2
_SHORT.maxlong = _LONGEST_VALUE


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, to be quoted in one of our own.

    A long line is cut, and what a terminal would obey is spelled out. Of a group of errors, the
    first is described too. A class of the user's own may raise instead of giving its text.
    """
    try:
        text = str.__str__(str(error))  # which may be of a class of the user's own too
    except BaseException as own:
        return f"no reason given, as its __str__ raised {class_name(own)}"
    line = (text.strip() or "no reason given").splitlines()[0]
    line = printable(line[: _LONGEST_LINE + 1])  # a million characters would take seconds
    if len(line) > _LONGEST_LINE:
        line = f"{line[:_LONGEST_LINE]}... ({len(text):,} characters)"
    if not issubclass(type(error), BaseExceptionGroup):  # whatever class it says it has
        return line
    first = BaseExceptionGroup.__dict__["exceptions"].__get__(error)[0]
    return f"{line}, the first of them {class_name(first)}: {first_line(first)}"


def class_name(value: object) -> str:
    """Returns the name of a value's class, whatever that class says of itself."""
    return printable(type.__dict__["__name__"].__get__(type(value)))


def shown(value: object) -> str:
    """Returns a value as Python shows it, to be quoted in a message: cut, and on one line.

    A class of the user's own may raise instead of showing itself.
    """
    if type(value) is int and abs(value) >= 10**_LONGEST_VALUE:
        return f"an integer of {value.bit_length():,} bits"  # digits take quadratic time
    try:
        return printable(_SHORT.repr(value))
    except BaseException:
        return f"an object of class {class_name(value)}"


def printable(text: str) -> str:
    r"""Returns a text in which what a terminal would obey is spelled as in Python: `\x1b`."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode()
        for char in text
    )


class UserError(ValueError):
    """Something in the user's input cannot work; the message says what to change.

    Commands print the message alone, without a traceback, and exit with `EXIT_USER_ERROR`. What the
    message quotes from outside cannot steer a terminal.
    """

    def __str__(self) -> str:
        return clean(" ".join(map(str, self.args)))


class FileError(UserError):
    """A file cannot be read; the message names it, what is wrong, and the fix."""


class WeightsError(UserError):
    """A weights folder does not hold the expected model; the message names the tensor or file."""


class OutOfMemoryError(UserError):
    """Devices ran out of memory; the message has the plan's numbers and the setting to change."""


class RewardError(UserError):
    """A reward function broke its contract; the message names the function."""


class PeerError(UserError):
    """Another process found that the input cannot work; the message says which one, and why."""


class RunError(RuntimeError):
    """A run cannot continue, through no fault of its input; the message says what to try.

    Commands print the message alone, without a traceback, and exit with `EXIT_FAULT`.
    """

    def __str__(self) -> str:
        return clean(" ".join(map(str, self.args)))


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


def near(text: str) -> str:
    """Returns a message in which paths below the working directory are relative, as given ones are.

    A run's own paths are absolute, so that it stays in its folder whatever changes the directory.
    """
    try:
        here = os.getcwd()
    except OSError:  # it is removed
        return text
    return text if here == os.sep else re.sub(rf"(?<![\w./-]){re.escape(here)}/", "", text)


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
