"""Standard output that is closed, ends or cannot be written."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from grpo_eqx.errors import EXIT_PIPE_CLOSED, RunError


@contextmanager
def standard_output() -> Iterator[None]:
    """Lets a command go on without standard output or error where these are closed.

    Ends the process with `EXIT_PIPE_CLOSED` where nobody reads standard output any more, as in
    `... | head`, and raises `RunError` where it cannot be written, as on a full disk.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell, as with >&-
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115  # until the end
    try:
        yield
        sys.stdout.flush()
    except OSError:
        failure = _failure()
        if failure is None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # drops the rest
        if isinstance(failure, BrokenPipeError):
            sys.exit(EXIT_PIPE_CLOSED)
        raise RunError(
            f"standard output cannot be written ({failure.strerror}): free space where it goes, or "
            f"send it elsewhere."
        ) from failure


def _failure() -> OSError | None:
    """Returns what is wrong with standard output, if anything is."""
    try:
        os.write(sys.stdout.fileno(), b"\n")  # what failed may be lost, so that a flush would not
    except OSError as error:
        return error
    return None
