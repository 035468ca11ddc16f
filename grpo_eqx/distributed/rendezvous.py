"""Makes all processes of a run find each other, and agree, before any of them touches a device.

JAX waits five minutes for a process that nobody started and then aborts, and does not notice two
with different settings. Here process 0 listens on the coordinator's own port, each other process
connects and sends its number, host and settings, and process 0 answers all of them: go on, or
the error message to end with. Then the port is free for JAX.
"""

import json
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from grpo_eqx.distributed.cluster import Cluster
from grpo_eqx.distributed.exchange import disagreement
from grpo_eqx.errors import RunError, UserError

_REPORT_SECONDS = 10.0
"""Seconds between process 0's reports of whom it waits for."""
_RETRY_SECONDS = 0.2
_HELLO_SECONDS = 1.0
"""Seconds that process 0 gives a connection to introduce itself."""
_ANSWER_SECONDS = 5.0
"""Seconds granted to the other side once the meeting is over."""
_LONGEST_LINE = 2**20


class _Hello(NamedTuple):
    """Message in which a process introduces itself."""

    process_id: int
    host: str
    facts: Mapping[str, str]


class _Verdict(NamedTuple):
    """Answer of process 0 to all processes present."""

    verdict: str = ""
    """Error to end with; empty where all go on."""
    absent: bool = False
    """Whether it is that some are absent, who may be there when the command is repeated."""


def meet(cluster: Cluster, facts: Mapping[str, str], timeout: float) -> None:
    """Returns once all processes are present and have the same `facts`.

    Raises an error in every process present, with the same message: `RunError` where after
    `timeout` seconds some are missing, as a host may only be late, and `UserError` where facts
    differ.
    """
    facts = {"the number of processes": str(cluster.num_processes), **facts}
    own = _Hello(cluster.process_id, socket.gethostname(), facts)
    part = _receive_all if cluster.process_id == 0 else _introduce
    verdict, absent = part(cluster, own, timeout)
    if verdict:
        raise RunError(verdict) if absent else UserError(verdict)


def _receive_all(cluster: Cluster, own: _Hello, timeout: float) -> _Verdict:
    """Runs process 0's part: returns the verdict that it sends to all present."""
    hellos, others, twin = {0: own}, dict[int, socket.socket](), None
    end, next_report = time.monotonic() + timeout, time.monotonic() + _REPORT_SECONDS
    with _listening(int(cluster.coordinator.rpartition(":")[2])) as server:
        while twin is None and time.monotonic() < end:
            _forget_the_dead(hellos, others)
            if len(hellos) >= cluster.num_processes:
                break
            if time.monotonic() > next_report:
                print(_present(cluster, hellos), file=sys.stderr, flush=True)
                next_report += _REPORT_SECONDS
            server.settimeout(_RETRY_SECONDS)
            try:
                other, _ = server.accept()
            except TimeoutError:
                continue
            other.settimeout(_HELLO_SECONDS)
            hello = _hello(_read(other))
            if hello is None:
                other.close()  # from some other program
                continue
            _forget_the_dead(hellos, others)  # those that died while this one connected
            if hello.process_id in hellos:
                twin = hello
                others[-1] = other  # so that it is told too
            else:
                hellos[hello.process_id] = hello
                others[hello.process_id] = other
        verdict = _wrong(cluster, hellos, twin, timeout)
        for other in others.values():
            with other:
                _write(other, verdict._asdict())
                other.settimeout(_ANSWER_SECONDS)
                _read(other)  # until the other side closes, so that JAX can have the port at once
    return verdict


def _forget_the_dead(hellos: dict[int, _Hello], others: dict[int, socket.socket]) -> None:
    """Drops processes that died while they waited: they are missing, and may be started again."""
    for process_id in [i for i, connection in others.items() if _is_closed(connection)]:
        others.pop(process_id).close()
        del hellos[process_id]


def _hello(said: Any) -> _Hello | None:
    """Parses a process's introduction; returns `None` for anything else."""
    if not isinstance(said, dict) or set(said) != set(_Hello._fields):
        return None
    process_id, facts = said["process_id"], said["facts"]
    # An id beyond the last comes from a process that was told of more processes.
    known = isinstance(process_id, int) and process_id >= 0 and isinstance(facts, dict)
    return _Hello(**said) if known else None


def _is_closed(connection: socket.socket) -> bool:
    """Returns whether the other side, which has nothing more to send, is gone."""
    try:
        connection.setblocking(False)
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        connection.settimeout(_ANSWER_SECONDS)


def _introduce(cluster: Cluster, own: _Hello, timeout: float) -> _Verdict:
    """Introduces this process to process 0; returns its answer, or that none came in time."""
    host, _, port = cluster.coordinator.rpartition(":")
    end = time.monotonic() + timeout
    while (left := end - time.monotonic()) > 0:
        try:
            address = host.strip("[]"), int(port)  # IPv6 has brackets
            with socket.create_connection(address, timeout=left) as connection:
                _write(connection, own._asdict())
                connection.settimeout(timeout + _ANSWER_SECONDS)
                answer = _read(connection)
        except OSError:
            answer = None
        if isinstance(answer, dict) and set(answer) == set(_Verdict._fields):
            return _Verdict(**answer)
        time.sleep(_RETRY_SECONDS)
    return _Verdict(
        f"process {cluster.process_id} of {cluster.num_processes} found no process 0 at "
        f"{cluster.coordinator} within {timeout:.0f} s: start process 0 there, with the same "
        f"address, and open the port.",
        absent=True,
    )


def _wrong(
    cluster: Cluster, hellos: Mapping[int, _Hello], twin: _Hello | None, timeout: float
) -> _Verdict:
    if twin is not None:
        first = hellos[twin.process_id]
        return _Verdict(
            f"two processes have the number {twin.process_id}, on {first.host} and {twin.host}: "
            f"give each its own."
        )
    facts = {process_id: hello.facts for process_id, hello in hellos.items()}
    names = {process_id: hello.host for process_id, hello in hellos.items()}
    if difference := disagreement(facts, names):
        return _Verdict(difference)
    if len(hellos) < cluster.num_processes:
        return _Verdict(
            f"{_present(cluster, hellos)}, which did not join within {timeout:.0f} s. Start the "
            f"same command on every host.",
            absent=True,
        )
    return _Verdict()


def _present(cluster: Cluster, hellos: Mapping[int, _Hello]) -> str:
    hosts = [f" ({host})" for host in cluster.hosts] or [""] * cluster.num_processes
    missing = [f"{i}{hosts[i]}" for i in range(cluster.num_processes) if i not in hellos]
    return (
        f"{len(hellos)} of {cluster.num_processes} hosts present: waiting for process "
        f"{', '.join(missing)}"
    )


@contextmanager
def _listening(port: int) -> Iterator[socket.socket]:
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        server = socket.create_server(("", port), family=family, dualstack_ipv6=both)
    except OSError as error:
        raise UserError(
            f"process 0 cannot listen on port {port} ({error.strerror}): another run may be using "
            f"it, so stop that run or choose another port."
        ) from error
    with server:
        yield server


def _write(connection: socket.socket, message: Mapping[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _read(connection: socket.socket) -> Any:
    """Reads one line of JSON; returns `None` where there is none."""
    try:
        with connection.makefile("rb") as lines:
            return json.loads(lines.readline(_LONGEST_LINE))
    except (OSError, ValueError, RecursionError):
        return None
