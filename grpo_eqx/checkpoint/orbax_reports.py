"""Filters of what Orbax reports beside the errors that it raises, for a run's output."""

import functools
import logging
import os
import sys
import traceback
import warnings
from pathlib import Path
from types import TracebackType
from typing import Any

import orbax.checkpoint as ocp

_ORBAX = f"{Path(ocp.__file__).parent}{os.sep}"
"""Folder of Orbax's code."""


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
    if record.name != "asyncio":
        return not record.pathname.startswith(_ORBAX)
    message = record.getMessage()
    if message.startswith("_GatheringFuture "):  # of several reads, whose code it does not name
        return not (record.exc_info and _passes_orbax(record.exc_info[2]))
    return _ORBAX not in message


def _report_others(report: Any, unraisable: Any) -> None:
    """Reports an exception that could not be raised, unless it came from an abandoned read."""
    late = str(unraisable.exc_value) == "Event loop is closed"  # it was read, and nobody waits
    if not late and not _passes_orbax(unraisable.exc_traceback):
        report(unraisable)


def _passes_orbax(trace: TracebackType | None) -> bool:
    return any(frame.f_code.co_filename.startswith(_ORBAX) for frame, _ in traceback.walk_tb(trace))
