"""Tracebacks of errors that a user can fix, without the frames of this package."""

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from grpo_eqx.errors import RunError, UserError

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]

_PACKAGE = Path(__file__).parent
_FULL = "GRPO_EQX_FULL_TRACEBACKS"


def users_frames(error: BaseException) -> str:
    """Formats the frames of an error's traceback that are not of this package; may be empty."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if _PACKAGE not in Path(frame.filename).parents and not frame.filename.startswith("<")
    ]
    return "".join(traceback.format_list(frames))


def shortened(earlier: Hook) -> Hook:
    """Returns an excepthook that shows `UserError` and `RunError` by the user's own frames.

    Other errors go to the earlier hook; so do all with GRPO_EQX_FULL_TRACEBACKS=1.
    """

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, UserError | RunError) or os.environ.get(_FULL):
            earlier(kind, error, trace)
            return
        cause = "" if error.__cause__ is None else users_frames(error.__cause__)
        lines = "Traceback (most recent call last):\n", users_frames(error), cause
        print("".join(lines) + f"{kind.__name__}: {error}", file=sys.stderr)

    return hook
