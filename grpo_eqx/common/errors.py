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
"""Exit code after Ctrl-C, or after a second one if the first asked the run to end after a step."""
EXIT_PIPE_CLOSED = 141
"""Exit code once nobody reads the output: 128 plus the number of SIGPIPE."""
EXIT_PREEMPTED = 75
"""Exit code of a preempted run, which the same command continues (`EX_TEMPFAIL`)."""


_LONGEST_LINE = 500
_LONGEST_VALUE = 80
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _LONGEST_VALUE - 2
_SHORT.maxlong = _LONGEST_VALUE


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, to be quoted in another message.

    Long lines are cut, and unprintable characters are spelled out. For a group of errors, the first
    error is described, too. An error of the user's class may itself raise when asked for its text.
    """
    try:
        text = str.__str__(str(error))  # a plain str, even for a subclass
    except BaseException as own:
        return f"no reason given, as its __str__ raised {class_name(own)}"
    line = (text.strip() or "no reason given").splitlines()[0]
    line = printable(line[: _LONGEST_LINE + 1])  # a million characters would take seconds
    if len(line) > _LONGEST_LINE:
        line = f"{line[:_LONGEST_LINE]}... ({len(text):,} characters)"
    if not issubclass(type(error), BaseExceptionGroup):  # its __class__ may lie
        return line
    first = BaseExceptionGroup.__dict__["exceptions"].__get__(error)[0]
    return f"{line}, the first of them {class_name(first)}: {first_line(first)}"


def class_name(value: object) -> str:
    """Returns the real name of a value's class, which the class cannot change."""
    return printable(type.__dict__["__name__"].__get__(type(value)))


def shown(value: object) -> str:
    """Returns the `repr` of a value, cut and on one line, to be quoted in a message.

    A value of the user's class may raise when asked for its `repr`.
    """
    if type(value) is int and abs(value) >= 10**_LONGEST_VALUE:
        return f"an integer of {value.bit_length():,} bits"  # digits take quadratic time
    try:
        return printable(_SHORT.repr(value))
    except BaseException:
        return f"an object of class {class_name(value)}"


def printable(text: str) -> str:
    r"""Returns a text whose unprintable characters are spelled as in Python: `\x1b`."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode()
        for char in text
    )


class UserError(ValueError):
    """Something in the user's input cannot work; the message says what to change.

    Commands print only the message, without a traceback, and exit with `EXIT_USER_ERROR`. Quotes
    in the message cannot steer a terminal.
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
    """A run cannot continue, although its input is valid; the message says what to try.

    Commands print only the message, without a traceback, and exit with `EXIT_FAULT`.
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

    The next attempt may succeed, as when a service did not answer, so the exit code is
    `EXIT_FAULT`.
    """


def near(text: str) -> str:
    """Returns a message with relative paths in place of paths below the working directory.

    A run's own paths are absolute, so that it stays in its folder if the directory changes.
    """
    try:
        here = os.getcwd()
    except OSError:  # the directory is removed
        return text
    return text if here == os.sep else re.sub(rf"(?<![\w./-]){re.escape(here)}/", "", text)


def exit_code(error: UserError | RunError) -> int:
    """Returns the exit code of a command that ends with an error."""
    return EXIT_FAULT if isinstance(error, RunError) else EXIT_USER_ERROR


def refuse_all(*checks: Callable[[], object]) -> None:
    """Makes all checks, and raises a single `UserError` for all of their errors."""
    refusals = []
    for check in checks:
        try:
            check()
        except UserError as error:
            refusals.append(str(error))
    if refusals:
        raise UserError(" ".join(refusals))


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Returns " (did you mean NAME?)" with the nearest known name; "" if none is near."""
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
