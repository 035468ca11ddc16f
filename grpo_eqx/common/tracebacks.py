"""Tracebacks of errors that a user can fix, without the frames of this package."""

import functools
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from grpo_eqx.common.clean_text import print_clean
from grpo_eqx.common.errors import RunError, UserError, near

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]

_PACKAGE = Path(__file__).parents[1]
_INSTALLED = {
    Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")
}
"""Folders of Python's library and of installed packages."""
_FULL = "GRPO_EQX_FULL_TRACEBACKS"


def users_frames(error: BaseException) -> str:
    """Formats the frames of an error's traceback up to the user's last frame; may be empty."""
    frames = _frames(error)
    own = [i for i, frame in enumerate(frames) if _is_users(frame)]
    return _formatted(frames[: own[-1] + 1] if own else [])


def frames_of_cause(error: BaseException) -> str:
    """Formats the frames of an error from the user's first frame on; may be empty."""
    frames = _frames(error)
    own = [i for i, frame in enumerate(frames) if _is_users(frame)]
    return _formatted(frames[own[0] :] if own else [])


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Lists the frames outside this package."""
    return [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if _PACKAGE not in Path(frame.filename).parents and not frame.filename.startswith("<")
    ]


def _formatted(frames: list[traceback.FrameSummary]) -> str:
    return "".join(traceback.format_list(frames))


def _is_users(frame: traceback.FrameSummary) -> bool:
    """Returns whether a frame is outside Python's library and installed packages."""
    return not any(folder in Path(frame.filename).parents for folder in _INSTALLED)


def print_traceback(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Prints an error's whole traceback, whose quotes cannot steer a terminal."""
    text = "".join(traceback.format_exception(kind, error, trace))
    print_clean(text, end="", file=sys.stderr)


def shortened(earlier: Hook, answer: Callable[[BaseException], str | None]) -> Hook:
    """Returns an excepthook that shows `UserError` and `RunError` with only the user's frames.

    Other errors go to the earlier hook, and with GRPO_EQX_FULL_TRACEBACKS=1, all errors do.

    **Arguments:**

    - `earlier`: the excepthook that shows other errors.
    - `answer`: returns a line to print below the message of another error, or `None`.
    """
    return functools.partial(_show, earlier, answer)


def is_pythons(hook: Hook) -> bool:
    """Returns whether an excepthook is Python's own, perhaps `shortened`."""
    if isinstance(hook, functools.partial) and hook.func is _show:
        return is_pythons(hook.args[0])
    return hook is sys.__excepthook__


def _show(
    earlier: Hook,
    answer: Callable[[BaseException], str | None],
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    if not isinstance(error, UserError | RunError) or os.environ.get(_FULL):
        if (note := answer(error)) is not None:
            error.add_note(note)
        earlier(kind, error, trace)
        return
    cause = "" if error.__cause__ is None else frames_of_cause(error.__cause__)
    frames = users_frames(error) + cause
    header = "Traceback (most recent call last):\n" if frames else ""
    print_clean(f"{header}{frames}{kind.__name__}: {near(str(error))}", file=sys.stderr)
