"""Filters of what Orbax reports beside the errors that it raises, for a run's output."""

import functools
import logging
import os
import sys
import traceback
import warnings
from types import TracebackType
from typing import Any

_ORBAX = f"{os.sep}orbax{os.sep}"
"""Part of the path of each of Orbax's files."""


@functools.cache
def silence_orbax() -> None:
    """Drops Orbax's notes on every folder, and the reads that it abandons when one fails.

    Each of these fails in a thread, or when it is collected, with pages of text; the first failure
    is also raised.
    """
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_is_of_others)
    for read in ("_read_array_index_and_device_put", r"Store\._get_array_metadatas"):
        warnings.filterwarnings("ignore", f"coroutine '{read}' was never awaited", RuntimeWarning)
    sys.unraisablehook = functools.partial(_report_others, sys.unraisablehook)


def _is_of_others(record: logging.LogRecord) -> bool:
    if _ORBAX in record.pathname or _ORBAX in record.getMessage():
        return False
    # A future of several reads names none of them; the trace of its exception does.
    return not record.exc_info or not _passes_orbax(record.exc_info[2])


def _report_others(report: Any, unraisable: Any) -> None:
    """Reports what could not be raised, unless it is of an abandoned read."""
    late = str(unraisable.exc_value) == "Event loop is closed"  # it was read, and nobody waits
    if not late and not _passes_orbax(unraisable.exc_traceback):
        report(unraisable)


def _passes_orbax(trace: TracebackType | None) -> bool:
    return any(_ORBAX in frame.f_code.co_filename for frame, _ in traceback.walk_tb(trace))
