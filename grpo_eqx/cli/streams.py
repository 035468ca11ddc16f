"""Standard output that is closed, ends or cannot be written, and clean messages of libraries."""

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from grpo_eqx.common.clean_text import clean
from grpo_eqx.common.errors import EXIT_PIPE_CLOSED, RunError


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


@contextmanager
def clean_messages() -> Iterator[None]:
    """Cleans what libraries say of texts from outside: their warnings and log records."""
    message, formatted = logging.LogRecord.getMessage, warnings.formatwarning
    # Of the class: others may set a factory of records, before or later, and pickle its records.
    setattr(logging.LogRecord, "getMessage", lambda record: clean(message(record)))  # noqa: B010
    warnings.formatwarning = lambda *of, **options: clean(formatted(*of, **options))
    try:
        yield
    finally:
        setattr(logging.LogRecord, "getMessage", message)  # noqa: B010
        warnings.formatwarning = formatted


def _failure() -> OSError | None:
    """Returns what is wrong with standard output, if anything is."""
    try:
        os.write(sys.stdout.fileno(), b"\n")  # what failed may be lost, so that a flush would not
    except OSError as error:
        return error
    return None
