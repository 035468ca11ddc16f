"""Concurrent processes: their output line by line, and none left behind."""

import errno
import math
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from queue import Empty, SimpleQueue
from types import FrameType
from typing import IO, Any, NamedTuple

from grpo_eqx.common.clean_text import clean, print_clean
from grpo_eqx.common.errors import EXIT_FAULT, EXIT_PREEMPTED, UserError
from grpo_eqx.launch.guardian import Guardian

_GRACE_SECONDS = 5.0
"""Time that processes have to exit by themselves after one of them failed."""
_SAVING_SECONDS = 30.0
"""Time that they have after this process was asked to end: a run saves a checkpoint."""
_SAME_SECONDS = 0.2
"""Time within which several signals are one."""
_KILL_SECONDS = 1.0
"""Time to wait for processes to disappear after a SIGKILL."""
_COPY_SECONDS = 5.0
"""Time to wait for the last lines to be written, if the reader of the output stalls."""
_POLL_SECONDS = 0.05
_NOISE = re.compile(
    rb"[ \d]*((\[Gloo\] Rank|is connected to|peer ranks\.|"
    rb"Expected number of connected peer ranks is :)[ \d]*)+"
)
"""Lines that JAX's collectives on CPUs print, for nobody to act on. Threads print them piece by
piece and at once, so the pieces come in any order."""
_PIPE_BYTES = 2**20
"""Maximum bytes in a pipe."""


class Process(NamedTuple):
    """Process to start."""

    name: str
    """Prefix of its output lines."""
    arguments: Sequence[str]
    environment: Mapping[str, str]


class Outcome(NamedTuple):
    """Result of processes that ran together."""

    code: int
    """First failing exit code, or 0. Where a signal ended the process, 128 plus its number, as in a
    shell."""
    told: bool
    """Whether this process was told to end, rather than a process of its own failing."""


class _Event(NamedTuple):
    """Event: a process ended, or this one was told to."""

    process: int | None
    """Index of the process that ended; `None` if this one was told to."""
    code: int


_Events = SimpleQueue[_Event]


def run_together(processes: Sequence[Process]) -> Outcome:
    """Runs all until the last ends or one fails.

    If one fails, or this process gets a SIGINT, SIGTERM or SIGHUP, all are ended, with everything
    that they started in their process groups; if this process is killed, they are killed. If a
    signal to this process has all of them exit with 0, or with `EXIT_PREEMPTED`, that is the
    outcome's code.
    """
    events: _Events = SimpleQueue()
    ended = threading.Event()
    hosts: list[subprocess.Popen[bytes]] = []
    threads, failure = [], ""
    with _signals_into(events), closing(Guardian()) as guardian:
        try:
            for index, process in enumerate(processes):
                hosts.append(_start(process, guardian))
                threads.append(_thread(_report_end, index, hosts[-1], events))
                for stream in ("stdout", "stderr"):
                    copied = process.name, hosts[-1], stream, events, ended
                    threads.append(_thread(_copy_lines, *copied))
            (ended_first, code), others = _wait(hosts, events)
            told = code != 0 and ended_first is None
            if code and ended_first is not None and others:
                failure = f"process {processes[ended_first].name} ended with exit code {code}"
                _say(f"{failure}; ending the others")
            if told:
                if code != 128 + signal.SIGPIPE:  # else nobody reads on
                    _say(
                        f"asked to end: all processes get SIGTERM, and {_SAVING_SECONDS:.0f} s to "
                        f"save; asked again, they end at once"
                    )
                _end(hosts, events, _SAVING_SECONDS)
            for agreed in (0, EXIT_PREEMPTED):
                if told and all(host.wait() == agreed for host in hosts):
                    code = agreed
            return Outcome(code, told)
        finally:
            _end(hosts, events, _GRACE_SECONDS)
            ended.set()
            for thread in threads:
                thread.join(_COPY_SECONDS)
            if failure:  # again, below all that the others printed as they ended
                _say(f"{failure} first, and the others were ended")


def _say(text: str) -> None:
    """Prints to standard error, if anybody reads that: processes are ended in any case."""
    with suppress(OSError):
        print_clean(text, file=sys.stderr)


@contextmanager
def _signals_into(events: _Events) -> Iterator[None]:
    """Turns signals that ask this process to end into events; SIGHUP only without `nohup`."""
    last = -math.inf

    def put(number: int, frame: FrameType | None) -> None:
        nonlocal last
        again, last = time.monotonic() - last < _SAME_SECONDS, time.monotonic()
        if not again:  # `timeout` signals its child, and then the whole group
            events.put(_Event(None, 128 + number))

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    handlers = {number: signal.signal(number, put) for number in numbers}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _start(process: Process, guardian: Guardian) -> subprocess.Popen[bytes]:
    try:
        host, reason = guardian.start(process.arguments, process.environment)
    except OSError as error:  # such as of too many open files
        fix = "start fewer, or raise the limit that ulimit shows"
        if error.errno == errno.E2BIG:
            fix = "shorten its arguments and environment variables"
        name = process.name
        raise UserError(f"cannot start process {name} ({error.strerror}): {fix}.") from error
    if not reason:
        return host
    _signal(host, signal.SIGKILL)
    host.communicate()
    program = process.arguments[0]
    fix = "give a program that is on PATH, or its path"
    if " " in program and len(process.arguments) == 1:
        fix = "leave out the quotes around the command"
    raise UserError(f"cannot start {program!r} ({reason}): {fix}.")


def _thread(function: Callable[..., None], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=function, args=arguments, daemon=True)
    thread.start()
    return thread


def _report_end(index: int, host: subprocess.Popen[bytes], events: _Events) -> None:
    code = host.wait()
    events.put(_Event(index, code if code >= 0 else 128 - code))


def _copy_lines(
    name: str,
    host: subprocess.Popen[bytes],
    stream: str,
    events: _Events,
    ended: threading.Event,
) -> None:
    """Copies lines of `stdout` or `stderr` to this process's own.

    Until the pipe closes, or all have ended: a daemon may keep it open.
    """
    source: IO[bytes] = getattr(host, stream)
    prefix, rest, last = f"[{name}] ".encode(), b"", False
    with source:
        while not last:
            last = ended.is_set()  # before polling, so that nothing written until then is missed
            if not select.select([source], [], [], 0 if last else _POLL_SECONDS)[0]:
                continue
            chunk = os.read(source.fileno(), _PIPE_BYTES)
            last = last or not chunk
            *lines, rest = (rest + chunk).split(b"\n")
            _write(prefix, lines, stream, events)
    if rest:
        _write(prefix, [rest], stream, events)


def _write(prefix: bytes, lines: Sequence[bytes], stream: str, events: _Events) -> None:
    target = getattr(sys, stream)
    try:
        write_lines(prefix, lines, target)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), target.fileno())
        if error.errno in (errno.EPIPE, errno.EIO):  # the reader, or the terminal, is gone
            events.put(_Event(None, 128 + signal.SIGPIPE))
        else:
            _say(f"{stream} cannot be written ({error.strerror}); ending all")
            events.put(_Event(None, EXIT_FAULT))


def write_lines(prefix: bytes, lines: Sequence[bytes], target: Any) -> None:
    """Writes lines of a process, cleaned where they go to a terminal, and else as they are."""
    lines = [line for line in lines if not _NOISE.fullmatch(line)]
    if target.isatty():
        lines = [_for_terminal(line, target.encoding) for line in lines]
    target.buffer.write(b"".join(prefix + line + b"\n" for line in lines))
    target.buffer.flush()


def _for_terminal(line: bytes, encoding: str) -> bytes:
    """Returns a line as a terminal may have it; of one that was overwritten, the last text."""
    text = line.decode(errors="backslashreplace").rstrip("\r").rpartition("\r")[-1]
    return clean(text.expandtabs(), encoding).encode(encoding)


def _wait(hosts: Sequence[subprocess.Popen[bytes]], events: _Events) -> tuple[_Event, int]:
    """Waits until all have ended, one fails, or this process is told to end.

    **Returns:** what has happened, with the code 0 if all have ended well; how many processes run.
    """
    running = set(range(len(hosts)))
    while running:
        index, code = events.get()
        if index is not None:
            running.remove(index)
            _signal(hosts[index], signal.SIGTERM)  # processes that it left behind
        if code:
            return _Event(index, code), len(running)
    return _Event(None, 0), 0


def _end(hosts: Sequence[subprocess.Popen[bytes]], events: _Events, grace: float) -> None:
    """Ends what is left of every process group; at once if this process is told to end again.

    **Arguments:**

    - `hosts`: the processes.
    - `events`: the queue of events.
    - `grace`: the seconds that the processes have to exit by themselves.
    """
    for number, seconds in ((signal.SIGTERM, grace), (signal.SIGKILL, _KILL_SECONDS)):
        for host in hosts:
            _signal(host, number)
        deadline = time.monotonic() + seconds
        while any(_signal(host, 0) for host in hosts) and time.monotonic() < deadline:
            try:
                index, _ = events.get(timeout=_POLL_SECONDS)
            except Empty:
                continue
            if index is None:
                break


def _signal(host: subprocess.Popen[bytes], number: int) -> bool:
    """Signals the process group; returns whether it still exists."""
    try:
        os.killpg(host.pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True
