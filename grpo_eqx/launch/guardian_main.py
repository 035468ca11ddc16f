"""A process that kills what a launcher started, if the launcher ends without doing so.

It runs as a script. What is killed cannot do it: a command may be any program.
"""

import contextlib
import os
import signal
import sys


def main() -> None:
    """Reads the numbers of processes that start or end; at the end of these, kills the rest."""
    alive: set[int] = set()
    for line in sys.stdin:
        alive ^= {int(line)}
    for pid in alive:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
