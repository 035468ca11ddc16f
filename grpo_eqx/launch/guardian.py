"""Ends what this process started even where it is killed itself."""

import contextlib
import subprocess
import sys
from pathlib import Path

_MAIN = Path(__file__).with_name("guardian_main.py")


class Guardian:
    """Process that kills others, with their process groups, once this one is gone.

    It reads from a pipe, which closes whatever ends this process, be it SIGKILL.
    """

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-S", str(_MAIN)],
            stdin=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )

    def note(self, pid: int) -> None:
        """Tells it of a leader of a process group that starts, or has ended."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # somebody killed it
            self.process.stdin.write(f"{pid}\n")
            self.process.stdin.flush()

    def end(self) -> None:
        """Ends it, when no process is left."""
        self.process.kill()
        with contextlib.suppress(OSError):
            self.process.communicate()
