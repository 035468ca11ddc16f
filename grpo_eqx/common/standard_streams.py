"""The standard streams and their descriptors, which the user's code may close or replace.

Functions that are called after the user's code are imported by name, because the code may replace
attributes of modules.
"""

import contextlib
import sys
from fcntl import F_DUPFD_CLOEXEC, F_GETFL, F_SETFL, fcntl
from os import close, dup2, fstat
from typing import Any, Final

_OUT_OF_THE_WAY: Final = 500
"""Least number of a copy, above numbers that functions may guess."""
_STREAMS: Final = {"stdin": (0, "r"), "stdout": (1, "w"), "stderr": (2, "w")}


def streams() -> dict[str, Any]:
    """Returns Python's streams, with `None` for closed streams."""
    found = {name: getattr(sys, name, None) for name in _STREAMS}
    return {name: None if _is_closed(x) else x for name, x in found.items()}


def restore_stream(name: str, before: Any) -> None:
    """Puts back a stream, or a new one in its place if it is closed."""
    if _is_closed(before):
        number, mode = _STREAMS[name]
        before = open(number, mode, closefd=False)  # noqa: SIM115
    setattr(sys, name, before)


def _is_closed(stream: Any) -> bool:
    try:
        return bool(stream.closed)
    except Exception:  # None, or not a stream
        return False


def copied(descriptor: int) -> int:
    """Returns a copy of a descriptor that child processes do not get."""
    with contextlib.suppress(OSError):  # so high a number may not be allowed
        return fcntl(descriptor, F_DUPFD_CLOEXEC, _OUT_OF_THE_WAY)
    return fcntl(descriptor, F_DUPFD_CLOEXEC, 0)


class Descriptors:
    """Files of the standard descriptors, with copies to restore them."""

    def __init__(self) -> None:
        self._files = _files()
        self._copies = {number: copied(number) for number in self._files}

    def restore(self) -> bool:
        """Restores closed and changed descriptors; returns whether there are any."""
        now = _files()
        changed = [number for number, file in self._files.items() if now.get(number) != file]
        for number in changed:
            with contextlib.suppress(OSError):  # the copy is also closed
                dup2(self._copies[number], number)
                fcntl(number, F_SETFL, self._files[number][-1])
        return bool(changed)

    def close(self) -> None:
        """Closes the copies."""
        for copy in self._copies.values():
            with contextlib.suppress(OSError):
                close(copy)


def _files() -> dict[int, tuple[int, int, int]]:
    """Returns the files of the standard descriptors, with flags such as O_NONBLOCK."""
    found = {}
    for number, _ in _STREAMS.values():
        with contextlib.suppress(OSError):  # it is closed
            status = fstat(number)
            found[number] = status.st_dev, status.st_ino, fcntl(number, F_GETFL)
    return found
