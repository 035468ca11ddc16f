"""All processes of a run find each other, and agree, before any of them touches a device.

JAX waits five minutes for a process that nobody started and then aborts, and does not notice two
that were told different things. Here process 0 listens on the coordinator's own port, each other
process connects and says who it is and what it was told, and process 0 answers all of them: go on,
or the sentence to end with. Then the port is free, for JAX.
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
from grpo_eqx.errors import UserError

_REPORT_SECONDS = 10.0
"""How often process 0 says whom it waits for."""
_RETRY_SECONDS = 0.2
_HELLO_SECONDS = 1.0
"""What process 0 gives a connection to say something."""
_ANSWER_SECONDS = 5.0
"""What is given to the other side of a meeting that is over."""
_LONGEST_LINE = 2**20


class _Hello(NamedTuple):
    """What a process says of itself."""

    process_id: int
    host: str
    facts: Mapping[str, str]


def meet(cluster: Cluster, facts: Mapping[str, str], timeout: float) -> None:
    """Returns once all processes are there and were told the same `facts`.

    Raises `UserError` in all that are there, with the same sentence, where after `timeout` seconds
    some are missing, or where facts differ.
    """
    facts = {"the number of processes": str(cluster.num_processes), **facts}
    own = _Hello(cluster.process_id, socket.gethostname(), facts)
    part = _receive_all if cluster.process_id == 0 else _introduce
    if verdict := part(cluster, own, timeout):
        raise UserError(verdict)


def _receive_all(cluster: Cluster, own: _Hello, timeout: float) -> str:
    """What is wrong, which all that are there are told too; empty where nothing is."""
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
                other.close()  # some other program's
                continue
            _forget_the_dead(hellos, others)  # while this one came
            if hello.process_id in hellos:
                twin = hello
                others[-1] = other  # is told too
            else:
                hellos[hello.process_id] = hello
                others[hello.process_id] = other
        verdict = _wrong(cluster, hellos, twin, timeout)
        for other in others.values():
            with other:
                _write(other, {"verdict": verdict})
                other.settimeout(_ANSWER_SECONDS)
                _read(other)  # until the other side closes: the port is free for JAX at once
    return verdict


def _forget_the_dead(hellos: dict[int, _Hello], others: dict[int, socket.socket]) -> None:
    """Those that died while they waited are missing, and may be started again."""
    for process_id in [i for i, connection in others.items() if _is_closed(connection)]:
        others.pop(process_id).close()
        del hellos[process_id]


def _hello(said: Any) -> _Hello | None:
    """What a connection says of a process, if it does."""
    if not isinstance(said, dict) or set(said) != set(_Hello._fields):
        return None
    process_id, facts = said["process_id"], said["facts"]
    # One beyond the last is that of a process that was told of more of them.
    known = isinstance(process_id, int) and process_id >= 0 and isinstance(facts, dict)
    return _Hello(**said) if known else None


def _is_closed(connection: socket.socket) -> bool:
    """Whether the other side, which has nothing more to say, is gone."""
    try:
        connection.setblocking(False)
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        connection.settimeout(_ANSWER_SECONDS)


def _introduce(cluster: Cluster, own: _Hello, timeout: float) -> str:
    """What process 0 answers."""
    host, _, port = cluster.coordinator.rpartition(":")
    end = time.monotonic() + timeout
    while (left := end - time.monotonic()) > 0:
        try:
            address = host.strip("[]"), int(port)  # of IPv6
            with socket.create_connection(address, timeout=left) as connection:
                _write(connection, own._asdict())
                connection.settimeout(timeout + _ANSWER_SECONDS)
                answer = _read(connection)
        except OSError:
            answer = None
        if isinstance(answer, dict) and "verdict" in answer:
            return str(answer["verdict"])
        time.sleep(_RETRY_SECONDS)
    return (
        f"process {cluster.process_id} of {cluster.num_processes} found no process 0 at "
        f"{cluster.coordinator} within {timeout:.0f} s: start it there too, with the same "
        f"address, and open the port."
    )


def _wrong(
    cluster: Cluster, hellos: Mapping[int, _Hello], twin: _Hello | None, timeout: float
) -> str:
    if twin is not None:
        first = hellos[twin.process_id]
        return (
            f"two processes say that they are process {twin.process_id}, on {first.host} and "
            f"{twin.host}: give each its own number."
        )
    facts = {process_id: hello.facts for process_id, hello in hellos.items()}
    names = {process_id: hello.host for process_id, hello in hellos.items()}
    if difference := disagreement(facts, names):
        return difference
    if len(hellos) < cluster.num_processes:
        return (
            f"{_present(cluster, hellos)}, which did not come within {timeout:.0f} s. Start the "
            f"same command on every host."
        )
    return ""


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
            f"process 0 cannot listen on port {port} ({error.strerror}): another run may have it, "
            f"so end that or choose another port."
        ) from error
    with server:
        yield server


def _write(connection: socket.socket, message: Mapping[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _read(connection: socket.socket) -> Any:
    """One line of JSON, or `None` where there is none."""
    try:
        with connection.makefile("rb") as lines:
            return json.loads(lines.readline(_LONGEST_LINE))
    except (OSError, ValueError, RecursionError):
        return None
