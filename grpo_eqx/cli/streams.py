"""Standard output that is closed or cannot be written, and clean messages of libraries."""

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
    """Lets a command go on if standard output or standard error are closed.

    Ends the process with `EXIT_PIPE_CLOSED` once nobody reads standard output, as in `... | head`.
    Raises `RunError` if standard output cannot be written, as on a full disk.
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
    """Cleans warnings and log records of libraries, which may quote texts from outside."""
    message, formatted = logging.LogRecord.getMessage, warnings.formatwarning
    # Patches the class, because others may set a factory of records, and pickle records.
    setattr(logging.LogRecord, "getMessage", lambda record: clean(message(record)))  # noqa: B010
    warnings.formatwarning = lambda *of, **options: clean(formatted(*of, **options))
    try:
        yield
    finally:
        setattr(logging.LogRecord, "getMessage", message)  # noqa: B010
        warnings.formatwarning = formatted


def _failure() -> OSError | None:
    """Returns the error of standard output, if any."""
    try:
        os.write(sys.stdout.fileno(), b"\n")  # a flush may succeed, with the failed text lost
    except OSError as error:
        return error
    return None
