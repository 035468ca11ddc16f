"""Names hosts that are missing at the start, or that disagree, before any device is touched.

JAX waits five minutes for a process that nobody started, and then aborts; and it does not notice
different settings. Here, process 0 listens on the coordinator's port, each other process connects
and sends its number, host and settings, and process 0 answers all of them: go on, or end with this
error message. Then the port is free for JAX.

Other programs can connect to the port too: they have a few seconds, and do not count.
"""

import json
import re
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from grpo_eqx.common.clean_text import print_clean
from grpo_eqx.common.errors import RunError, UserError
from grpo_eqx.distributed.callers import Caller, Callers, listening
from grpo_eqx.distributed.cluster import Cluster
from grpo_eqx.distributed.exchange import disagreement

_REPORT_SECONDS = 10.0
"""Seconds between process 0's reports on missing processes."""
_RETRY_SECONDS = 0.2
_CONNECT_SECONDS = 5.0
"""Seconds to try one address of process 0."""
_ANSWER_SECONDS = 5.0
"""Seconds that the other side may take once the meeting is over."""
_LONGEST_ANSWER = 2**20
_JOB = "the job"
_NUMBER = "the number of processes"


class _Hello(NamedTuple):
    """Message in which a process introduces itself."""

    process_id: int
    host: str
    facts: Mapping[str, str]


class _Welcome(NamedTuple):
    """First answer of process 0 to an introduction; the verdict follows."""

    seconds: float
    """Seconds until the verdict, at most."""


class _Verdict(NamedTuple):
    """Last answer of process 0 to all processes present."""

    verdict: str = ""
    """Error message to end with; empty if all go on."""
    absent: bool = False
    """Whether the error is that processes are missing, which may be present in the next attempt."""


def meet(cluster: Cluster, facts: Mapping[str, str], timeout: float) -> None:
    """Returns once all processes are present and have the same `facts`.

    Otherwise, raises an error with the same message in every process present: `RunError` if
    processes are missing after `timeout` seconds, because their hosts may only be late, or if the
    port is taken, and `UserError` if facts differ.
    """
    facts = {_NUMBER: str(cluster.num_processes), **facts}
    if cluster.job:
        facts[_JOB] = cluster.job
    own = _Hello(cluster.process_id, socket.gethostname(), facts)
    part = _receive_all if cluster.process_id == 0 else _introduce
    verdict, absent = part(cluster, own, timeout)
    if verdict:
        raise RunError(verdict) if absent else UserError(verdict)


def _receive_all(cluster: Cluster, own: _Hello, timeout: float) -> _Verdict:
    """Runs process 0's part: returns the verdict, after sending it to all processes present."""
    end, next_report = time.monotonic() + timeout, time.monotonic() + _REPORT_SECONDS

    def understood(line: bytes) -> _Hello | None:
        return _hello(line, cluster.job)

    def welcome(caller: Caller[_Hello]) -> None:
        caller.send(_line(_Welcome(max(0.0, end - time.monotonic()))))

    with (
        listening(int(cluster.coordinator.rpartition(":")[2])) as server,
        Callers(server, understood, welcome) as callers,
    ):
        while (left := end - time.monotonic()) > 0:
            hellos = [own, *callers.messages]
            if _twins(cluster, hellos) is not None or not _missing(cluster, hellos):
                break
            if time.monotonic() > next_report:
                print_clean(_present(cluster, hellos), file=sys.stderr)
                next_report += _REPORT_SECONDS
            callers.serve(min(left, _RETRY_SECONDS))
        hellos = [own, *callers.messages]
        verdict = _wrong(cluster, hellos, timeout)

        def answer(hello: _Hello) -> bytes:
            # A process with a number beyond the last is refused alone, if no other is missing.
            return _line(_Verdict(verdict.verdict or _disagreement([own, hello]), verdict.absent))

        callers.tell(answer, _ANSWER_SECONDS)  # after that, the port is free for JAX
    return verdict


def _hello(line: bytes, job: str) -> _Hello | None:
    """Parses the introduction of a process of this job; returns `None` for anything else."""
    said = _parsed(line, _Hello)
    if said is None:
        return None
    process_id, host, facts = said.values()
    if type(process_id) is not int or not isinstance(host, str) or not isinstance(facts, dict):
        return None
    if not host.isprintable() or not all(isinstance(fact, str) for fact in facts.values()):
        return None
    # A process that was started as one of more processes may have a number beyond the last.
    number = facts.get(_NUMBER, "")
    possible = re.fullmatch("[0-9]{1,9}", number) and 0 < process_id < int(number)
    return _Hello(**said) if possible and facts.get(_JOB, "") == job else None


def _introduce(cluster: Cluster, own: _Hello, timeout: float) -> _Verdict:
    """Introduces this process to process 0; returns the answer, or that no answer came in time."""
    host, _, port = cluster.coordinator.rpartition(":")
    end, other = time.monotonic() + timeout, ""
    while (left := end - time.monotonic()) > 0:
        try:
            address = host.strip("[]"), int(port)  # IPv6 has brackets
            patience = min(left, _CONNECT_SECONDS)
            with socket.create_connection(address, timeout=patience) as connection:
                verdict = _verdict(connection, own, end, timeout)
            other = " Something else, or another run, answers there now."
        except OSError:
            verdict, other = None, ""
        if verdict is not None:
            return verdict
        time.sleep(_RETRY_SECONDS)
    return _Verdict(
        f"process {cluster.process_id} of {cluster.num_processes} found no process 0 at "
        f"{cluster.coordinator} within {timeout:.0f} s: start process 0 there, with the same "
        f"address, and open the port.{other}",
        absent=True,
    )


def _verdict(connection: socket.socket, own: _Hello, end: float, timeout: float) -> _Verdict | None:
    """Introduces this process; returns the answer, `None` if the other side is not process 0.

    **Arguments:**

    - `connection`: the connection to what may be process 0.
    - `own`: the introduction.
    - `end`: the time by which the introduction must be answered.
    - `timeout`: seconds that a meeting may take.
    """
    connection.sendall(_line(own) + b"\n")
    line, rest = _received(connection, b"", end)
    welcome = _parsed(line, _Welcome)
    if welcome is None or type(welcome["seconds"]) is not float:
        return None
    answered_by = time.monotonic() + min(timeout, welcome["seconds"]) + _ANSWER_SECONDS
    answer = _parsed(_received(connection, rest, answered_by)[0], _Verdict)
    if answer is None or [type(value) for value in answer.values()] != [str, bool]:
        return None
    return _Verdict(**answer)


def _received(connection: socket.socket, start: bytes, end: float) -> tuple[bytes, bytes]:
    """Receives a line, even in small pieces; returns it, and the bytes after it.

    **Arguments:**

    - `connection`: the connection.
    - `start`: the part of the line that was received before.
    - `end`: the deadline.

    Raises `TimeoutError` at the deadline.
    """
    received = start
    while b"\n" not in received and len(received) <= _LONGEST_ANSWER:
        if (left := end - time.monotonic()) <= 0:
            raise TimeoutError
        connection.settimeout(left)
        chunk = connection.recv(_LONGEST_ANSWER)
        if not chunk:
            break
        received += chunk
    line, _, rest = received.partition(b"\n")
    return line, rest


def _wrong(cluster: Cluster, hellos: list[_Hello], timeout: float) -> _Verdict:
    if (twins := _twins(cluster, hellos)) is not None:
        first, second = twins
        return _Verdict(
            f"two processes have the number {first.process_id}, on {first.host} and "
            f"{second.host}: give each its own."
        )
    missing = _missing(cluster, hellos)
    if difference := _disagreement(hellos if missing else _members(cluster, hellos)):
        return _Verdict(difference)
    if missing:
        return _Verdict(
            f"{_present(cluster, hellos)}, which did not join within {timeout:.0f} s. Start the "
            f"same command on every host.",
            absent=True,
        )
    return _Verdict()


def _members(cluster: Cluster, hellos: list[_Hello]) -> list[_Hello]:
    return [hello for hello in hellos if hello.process_id < cluster.num_processes]


def _twins(cluster: Cluster, hellos: list[_Hello]) -> tuple[_Hello, _Hello] | None:
    """Returns two introductions with the same number, if there are any."""
    by_number: dict[int, _Hello] = {}
    for hello in _members(cluster, hellos):
        if (first := by_number.setdefault(hello.process_id, hello)) is not hello:
            return first, hello
    return None


def _disagreement(hellos: list[_Hello]) -> str:
    facts = {hello.process_id: hello.facts for hello in hellos}
    return disagreement(facts, {hello.process_id: hello.host for hello in hellos})


def _missing(cluster: Cluster, hellos: list[_Hello]) -> list[int]:
    present = {hello.process_id for hello in hellos}
    return [i for i in range(cluster.num_processes) if i not in present]


def _present(cluster: Cluster, hellos: list[_Hello]) -> str:
    hosts = [f" ({host})" for host in cluster.hosts] or [""] * cluster.num_processes
    missing = _missing(cluster, hellos)
    return (
        f"{cluster.num_processes - len(missing)} of {cluster.num_processes} hosts present: waiting "
        f"for process {', '.join(f'{i}{hosts[i]}' for i in missing)}"
    )


def _line(message: _Hello | _Welcome | _Verdict) -> bytes:
    return json.dumps(message._asdict()).encode()


def _parsed(line: bytes, kind: type[_Hello | _Welcome | _Verdict]) -> dict[str, Any] | None:
    """Parses a line of JSON; returns the fields of a message, `None` for anything else."""
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(said, dict) or set(said) != set(kind._fields):
        return None
    return {name: said[name] for name in kind._fields}
