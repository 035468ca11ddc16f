"""Start of processes that never outlive this one, even where it is killed.

This file also runs as a script, which imports nothing of the package. Without arguments it is the
guardian, which kills what a launcher leaves behind; what is killed cannot do it, as a command may
be any program. With arguments it becomes a command, as soon as the guardian knows of it.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence


class Guardian:
    """Process that kills others, with their process groups, once this one is gone.

    It reads from a pipe, which closes whatever ends this process, be it SIGKILL.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-S", __file__],
            stdin=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )

    def start(
        self, command: Sequence[str], environment: Mapping[str, str]
    ) -> tuple[subprocess.Popen[bytes], str]:
        """Starts a command in a process group of its own.

        **Returns:** its process, and why it could not become the command; empty once it has.
        """
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, "-I", "-S", __file__, str(theirs.fileno()), *command],
                    env=environment,
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                )
            self._note(process.pid)
            with contextlib.suppress(OSError):  # the process was killed
                ours.sendall(b"\n")
            return process, _answer(ours)

    def _note(self, pid: int) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # somebody killed the guardian
            self._process.stdin.write(f"{pid}\n")
            self._process.stdin.flush()

    def close(self) -> None:
        """Ends it, when no process is left."""
        self._process.kill()
        with contextlib.suppress(OSError):
            self._process.communicate()


def _answer(starting: socket.socket) -> str:
    """Returns why a process could not become its command; empty once it has."""
    try:
        said = starting.recv(16)
    except OSError:
        return ""
    return os.strerror(int(said)) if said else ""


def _guard() -> None:
    """Reads the leaders of process groups; once their launcher is gone, kills all of them."""
    leaders = [int(line) for line in sys.stdin]
    for pid in leaders:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


def _become(command: Sequence[str], fd: int) -> None:
    """Executes a command once the launcher says so; never, if the launcher is killed before.

    **Arguments:**

    - `command`: the program and its arguments.
    - `fd`: a socket by which the launcher's word comes, and the number of an error goes.
    """
    if not os.read(fd, 1):
        return
    os.set_inheritable(fd, False)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores, and programs inherit
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], list(command))
    except OSError as error:
        os.write(fd, str(error.errno).encode())


if __name__ == "__main__":
    if sys.argv[1:]:
        _become(sys.argv[2:], int(sys.argv[1]))
    else:
        _guard()
