"""Parent of a worker, which ends all that the worker started, however the worker or the run ends.

It runs as a script, imports nothing of this package, and calls no code of the user's own. A worker
cannot do it: its call may never let go of the GIL, and what it started would survive it. On Linux,
orphans become the guardian's children, also those in sessions of their own; on other systems they
are not found.
"""

import contextlib
import ctypes
import importlib.util
import os
import select
import signal
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path

_RUN = 0
"""Descriptor of the socket to the run, which closes it to have the worker ended."""
_TICK = 1.0
"""Seconds between looks at whether the run is still there."""
_MOST_SECONDS = 10.0
"""Seconds for what was killed to end: the system may have it wait for a disk."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def main(calls: int) -> None:
    """Starts a worker with the descriptor of its calls, waits, and ends what is left.

    Tells the run how the worker has ended.
    """
    run = os.getppid()
    _control(_PR_SET_CHILD_SUBREAPER, 1)
    guardian, worker = os.getpid(), os.fork()
    if worker == 0:
        _control(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == guardian:
            _work(calls)
        os._exit(0)
    os.close(calls)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP):
        signal.signal(number, signal.SIG_IGN)
    code = _ended(worker, run)
    code = _end_all(worker) if code is None else _end_all(worker, code)
    with contextlib.suppress(OSError):  # the run has ended
        os.write(_RUN, _in_words(code).encode())


def _work(calls: int) -> None:
    """Serves calls in this process, in a session of its own and without the guardian's socket.

    What it sets on its output, as that a write does not wait, is not set on the run's. Files stay
    shared, in which each process continues where another has ended.
    """
    os.setsid()
    _reopen(_RUN, os.devnull, os.O_RDONLY)
    for number in (1, 2):
        with contextlib.suppress(OSError):  # it is closed, a socket, or a pipe that nobody reads
            if not stat.S_ISREG(os.fstat(number).st_mode):
                _reopen(number, f"/dev/fd/{number}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
                os.set_blocking(number, True)
    path = Path(__file__).with_name("worker_main.py")
    spec = importlib.util.spec_from_file_location("grpo_eqx_worker", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(calls)


def _reopen(number: int, path: str, flags: int) -> None:
    file = os.open(path, flags)
    os.dup2(file, number)
    os.close(file)


def _ended(worker: int, run: int) -> int | None:
    """Waits until the worker has ended, and returns its exit code; `None` if the run ends it."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        codes = dict(_reaped())
        if worker in codes:
            return codes[worker]
        ready, _, _ = select.select([_RUN, woken], [], [], _TICK)
        if _RUN in ready or os.getppid() != run:
            return None
        if woken in ready:
            os.read(woken, 1000)


def _end_all(worker: int, code: int = -signal.SIGKILL) -> int:
    """Kills the worker and its descendants until there are none; returns the worker's exit code."""
    latest = time.monotonic() + _MOST_SECONDS
    while time.monotonic() < latest:
        for process in [worker, *descendants(os.getpid())]:
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)
        code = dict(_reaped()).get(worker, code)
        if not _has_children():
            break
        time.sleep(0.002)
    return code


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _reaped() -> Iterator[tuple[int, int]]:
    """Waits for the children that have ended; yields their numbers and exit codes."""
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            yield found[0], os.waitstatus_to_exitcode(found[1])


def descendants(process: int) -> list[int]:
    """Lists the processes that a process and its descendants started, as far as /proc has them."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):  # it has ended by now
            parent = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[1]
            children.setdefault(int(parent), []).append(int(folder.name))
    found = children.get(process, [])
    for each in found:  # which grows meanwhile
        found += children.get(each, [])
    return found


def _in_words(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _control(option: int, value: int) -> None:
    """Sets an option of this process, where the system is Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
