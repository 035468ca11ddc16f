"""Processes of this machine, to see what a test has left behind."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Process(NamedTuple):
    """A process, perhaps a zombie, by its numbers."""

    pid: int
    parent: int
    session: int


def with_variable(name: str) -> set[int]:
    """Lists processes in whose environment a variable was as they, or those they forked, began.

    Their sessions and parents may be any; zombies have no environment.
    """
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{name}=".encode() in (folder / "environ").read_bytes():
                found.add(int(folder.name))
        except OSError:  # it has ended by now, or is another user's
            continue
    return found


def processes() -> Iterator[Process]:
    """Lists all processes, as /proc has them."""
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended by now
            continue
        yield Process(int(folder.name), int(fields[1]), int(fields[3]))
