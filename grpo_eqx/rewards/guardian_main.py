"""A process that kills the workers of a run which ended without doing so, such as by SIGKILL.

It runs as a script. A worker cannot do it: its call may never let go of the GIL, and what it
started would survive it.
"""

import contextlib
import os
import signal
import sys


def main() -> None:
    """Reads the numbers of workers that start or end; once there can be no more, kills the rest."""
    alive: set[int] = set()
    for line in sys.stdin:
        alive ^= {int(line)}
    for pid in alive:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
