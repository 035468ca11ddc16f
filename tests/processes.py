"""Processes of this machine, to see what a test has left behind."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Process(NamedTuple):
    """A process, perhaps a zombie, by its numbers."""

    pid: int
    parent: int
    session: int


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
