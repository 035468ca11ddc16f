"""Processes that tools and environments start and leave running: they end with the run's."""

import atexit
import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

from grpo_eqx.common.errors import listed
from grpo_eqx.common.process_state import warn
from grpo_eqx.rewards.guardian_main import descendants

THREAD = "grpo_eqx tools"
"""Name of the threads that call tools and environments."""


class LeftProcesses:
    """Record of processes that tools and environments have started and not waited for.

    Linux lists the children of each thread. Those that still run when this process exits are
    killed. On other systems, none is found.
    """

    def __init__(self) -> None:
        self._found: dict[int, str] = {}
        """Number of each process, and when it started: numbers are used again."""
        self._owner = os.getpid()
        atexit.register(self.end)

    def record(self, thread: threading.Thread | None = None) -> None:
        """Records the children of a thread, by default of this one.

        When a thread ends, its children become those of another.
        """
        self._found |= self._children(thread)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Records the children that this thread starts in the block, and no others of it."""
        before = self._children()
        try:
            yield
        finally:
            now = self._children()
            self._found |= {each: now[each] for each in now.keys() - before.keys()}

    def _children(self, thread: threading.Thread | None = None) -> dict[int, str]:
        """Returns the children of a thread, by default of this one, and when they started."""
        thread = threading.current_thread() if thread is None else thread
        children = Path(f"/proc/{self._owner}/task/{thread.native_id}/children")
        with contextlib.suppress(OSError):
            starts = {each: _start_of(each) for each in map(int, children.read_text().split())}
            return {each: start for each, start in starts.items() if start is not None}
        return {}

    def end(self) -> None:
        """Kills what is left, with the processes that it has started, and says so."""
        if os.getpid() != self._owner:  # a fork of the process
            return
        for thread in threading.enumerate():  # some calls never return
            if thread.name == THREAD:
                self.record(thread)
        left = [each for each, start in self._found.items() if _start_of(each) == start]
        self._found.clear()
        if not left:
            return
        names = listed([f"{_name_of(each)} ({each})" for each in left[:5]])
        more = f" and {len(left) - 5} more" if len(left) > 5 else ""
        for process in [*left, *(child for each in left for child in descendants(each))]:
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)
        warn(
            f"tools or environments left processes running, which were killed: {names}{more}. End "
            f"them in the call that starts them, or in close"
        )


LEFT = LeftProcesses()


def _start_of(process: int) -> str | None:
    """Returns when a child of this process started; `None` if it has ended."""
    with contextlib.suppress(OSError):
        # The name, in parentheses, may have blanks.
        fields = Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2]
        state, parent, *_, start = fields.split()[:20]
        if state != "Z" and int(parent) == os.getpid():
            return start
    return None


def _name_of(process: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/comm").read_text(errors="replace").strip()
    return "a process"
