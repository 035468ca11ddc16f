"""Strangers at the port of a meeting, or in the place of process 0: nobody waits for them."""

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from grpo_eqx.common.errors import RunError, UserError
from grpo_eqx.distributed.cluster import Cluster
from grpo_eqx.distributed.missing_hosts import meet

TIMEOUT = 1.0
"""Seconds of a meeting that lacks a process."""
GENEROUS = 12.0
"""Seconds in which it must have ended, on a busy machine."""
TLS_HELLO = bytes.fromhex("16030100c8010000c403030a")
NEVER = threading.Event()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def connected(port: int) -> socket.socket:
    """Connects as soon as somebody listens."""
    for _ in range(10_000):
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection(("localhost", port), timeout=5)
        NEVER.wait(0.01)
    raise AssertionError("nobody listens")


def drip(connection: socket.socket) -> None:
    """Sends a byte at a time until the other side hangs up."""
    with contextlib.suppress(OSError):
        while not NEVER.wait(0.05):
            connection.sendall(b"[")


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def flood(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        for _ in range(64):
            connection.sendall(bytes(2**20))


def sends(line: bytes) -> Callable[[socket.socket], None]:
    def send(connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection.sendall(line)

    return send


def half_close(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(b"{")
        connection.shutdown(socket.SHUT_WR)


STRANGERS: dict[str, tuple[int, Callable[[socket.socket], None]]] = {
    "drips": (3, drip),
    "is silent": (40, sends(b"")),
    "is silent, often": (300, sends(b"")),
    "resets": (10, reset),
    "half closes": (10, half_close),
    "floods": (2, flood),
    "speaks HTTP": (3, sends(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")),
    "speaks TLS": (3, sends(TLS_HELLO)),
    "nests": (3, sends(b"[" * 200_000 + b"\n")),
    "counts": (3, sends(b"9" * 10_000 + b"\n")),
}
"""What strangers do, and how many of each there are."""


@contextlib.contextmanager
def strangers(port: int, number: int, act: Callable[[socket.socket], None]) -> Iterator[None]:
    """Has strangers call while the context is entered, once all of them are connected."""
    with contextlib.ExitStack() as stack:
        callers = [stack.enter_context(connected(port))]
        with contextlib.suppress(OSError):  # the meeting is over already
            for _ in range(number - 1):
                caller = socket.create_connection(("localhost", port), timeout=5)
                callers.append(stack.enter_context(caller))
        for caller in callers:
            threading.Thread(target=act, args=(caller,), daemon=True).start()
        yield


def outcome(port: int, process_id: int, number: int, timeout: float, job: str = "") -> str:
    try:
        meet(Cluster(f"localhost:{port}", number, process_id, job=job), {"seed": "0"}, timeout)
    except (RunError, UserError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.grid
@pytest.mark.parametrize("kind", STRANGERS)
def test_strangers_delay_no_process_and_no_deadline(kind: str) -> None:
    port, start = free_port(), time.monotonic()
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(outcome, port, 0, 2, 60.0)
        with strangers(port, *STRANGERS[kind]):
            assert outcome(port, 1, 2, 60.0) == ""
            assert first.result() == ""
        first = threads.submit(outcome, port, 0, 2, TIMEOUT)
        with strangers(port, *STRANGERS[kind]):
            assert first.result().startswith(
                "RunError: 1 of 2 hosts present: waiting for process 1"
            )
    assert time.monotonic() - start < 2 * GENEROUS


FACTS = {"the number of processes": "3", "seed": "0"}
IMPOSSIBLE = [
    {"process_id": 10**9, "host": "x", "facts": FACTS},
    {"process_id": 10**9, "host": "x", "facts": {**FACTS, "the number of processes": "9" * 30}},
    {"process_id": -1, "host": "x", "facts": FACTS},
    {"process_id": 0, "host": "x", "facts": FACTS},
    {"process_id": 3, "host": "x", "facts": FACTS},
    {"process_id": True, "host": "x", "facts": FACTS},
    {"process_id": 1.0, "host": "x", "facts": FACTS},
    {"process_id": "1", "host": "x", "facts": FACTS},
    {"process_id": 1, "host": "\33[2J", "facts": FACTS},
    {"process_id": 1, "host": None, "facts": FACTS},
    {"process_id": 1, "host": "x", "facts": {"seed": "0"}},
    {"process_id": 1, "host": "x", "facts": {**FACTS, "seed": 0}},
    {"process_id": 1, "host": "x", "facts": {**FACTS, "the job": "another"}},
    {"process_id": 1, "host": "x", "facts": {**FACTS, "the number of processes": "-3"}},
    {"process_id": 1, "host": "x", "facts": []},
    {"process_id": 1, "host": "x", "facts": FACTS, "more": 0},
]


def test_no_impossible_process_counts_as_present() -> None:
    port = free_port()
    with ThreadPoolExecutor(3) as threads, contextlib.ExitStack() as stack:
        first = threads.submit(outcome, port, 0, 3, 60.0)
        for message in IMPOSSIBLE:
            caller = stack.enter_context(connected(port))
            caller.sendall(json.dumps(message).encode() + b"\n")
            assert caller.recv(100) == b"", message
        others = [threads.submit(outcome, port, i, 3, 60.0) for i in (1, 2)]
        assert [each.result() for each in (first, *others)] == ["", "", ""]


def test_one_that_was_told_of_more_processes_is_refused_alone() -> None:
    port = free_port()
    hello = {"process_id": 3, "host": "x", "facts": {**FACTS, "the number of processes": "4"}}
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(outcome, port, 0, 2, 60.0)
        with connected(port) as stray, stray.makefile("rb") as lines:
            stray.sendall(json.dumps(hello).encode() + b"\n")
            lines.readline()  # it is welcome, until all are there
            second = threads.submit(outcome, port, 1, 2, 60.0)
            said = json.loads(lines.readline())["verdict"]
        assert "the hosts disagree on the number of processes: 2 on process 0" in said
        assert (first.result(), second.result()) == ("", "")


def test_processes_of_another_job_are_strangers() -> None:
    port = free_port()
    with ThreadPoolExecutor(3) as threads:
        first = threads.submit(outcome, port, 0, 2, 60.0, "a")
        stray = outcome(port, 1, 2, TIMEOUT, "b")
        assert stray.startswith("RunError: process 1 of 2 found no process 0 at")
        assert "Something else, or another run, answers there now." in stray
        assert outcome(port, 1, 2, 60.0, "a") == ""
        assert first.result() == ""


def test_a_port_that_another_program_has_may_be_free_later() -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        said = outcome(port, 0, 2, TIMEOUT)
    assert said.startswith(f"RunError: process 0 cannot listen on port {port} (Address already in")
    assert "choose another port" in said
    assert outcome(port, 0, 2, 0.1).startswith("RunError: 1 of 2 hosts present")


WELCOME = b'{"seconds": 1e6}\n'


def welcome_and_drip(connection: socket.socket) -> None:
    connection.sendall(WELCOME)
    drip(connection)


IMPOSTORS: dict[str, Callable[[socket.socket], None]] = {
    "is silent": sends(b""),
    "drips": drip,
    "floods": flood,
    "speaks HTTP": sends(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
    "resets": reset,
    "half closes": half_close,
    "welcomes and is silent": sends(WELCOME),
    "welcomes and drips": welcome_and_drip,
    "answers nonsense": sends(WELCOME + b'{"verdict": 1, "absent": []}\n'),
    "welcomes for ever": sends(b'{"seconds": Infinity}\n'),
    "counts": sends(b'{"seconds": ' + b"9" * 10_000 + b"}\n"),
}
"""Servers that a process may find in the place of process 0."""


@pytest.mark.grid
@pytest.mark.parametrize("kind", IMPOSTORS)
def test_a_server_that_is_no_process_0_delays_no_deadline(kind: str) -> None:
    with socket.create_server(("localhost", 0)) as server, contextlib.ExitStack() as stack:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection = stack.enter_context(server.accept()[0])
                    threading.Thread(
                        target=IMPOSTORS[kind], args=(connection,), daemon=True
                    ).start()

        threading.Thread(target=serve, daemon=True).start()
        start = time.monotonic()
        said = outcome(server.getsockname()[1], 1, 2, TIMEOUT)
        assert said.startswith("RunError: process 1 of 2 found no process 0 at localhost:")
        assert time.monotonic() - start < GENEROUS
