"""Processes, here threads, meet at a port; all that are there hear the same."""

import json
import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest

from grpo_eqx.common.errors import RunError, UserError
from grpo_eqx.distributed.cluster import Cluster
from grpo_eqx.distributed.exchange import brief
from grpo_eqx.distributed.missing_hosts import meet


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def outcomes(
    ids: list[int],
    num_processes: int,
    facts: Mapping[int, Mapping[str, str]] | None = None,
    timeout: float = 20.0,
    port: int | None = None,
    hosts: tuple[str, ...] = (),
) -> list[str]:
    """What each process that is there ends with; an empty text where it goes on."""
    address = f"localhost:{free_port() if port is None else port}"

    def run(process_id: int) -> str:
        told = {"seed": "0"} if facts is None else facts[process_id]
        try:
            meet(Cluster(address, num_processes, process_id, hosts), told, timeout)
        except (RunError, UserError) as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(ids)) as threads:
        return list(threads.map(run, ids))


def test_all_that_agree_go_on_and_leave_the_port_free() -> None:
    port = free_port()
    for _ in range(3):
        assert outcomes([2, 0, 3, 1], 4, port=port) == [""] * 4


def test_missing_hosts_are_named_in_all_that_are_there() -> None:
    found = outcomes([0, 1, 3], 4, timeout=1.0)
    assert len(set(found)) == 1
    assert found[0].startswith("3 of 4 hosts present: waiting for process 2, which did not join")
    assert "Start the same command on every host" in found[0]


@pytest.mark.parametrize("process_id", [0, 1])
def test_whoever_is_missing_may_come_when_it_is_tried_again(process_id: int) -> None:
    cluster = Cluster(f"localhost:{free_port()}", 2, process_id)
    with pytest.raises(RunError):
        meet(cluster, {}, timeout=0.3)


def test_missing_hosts_are_named_by_their_addresses_where_these_are_known() -> None:
    found = outcomes([0], 2, timeout=0.5, hosts=("10.0.0.2", "10.0.0.3"))
    assert found[0].startswith("1 of 2 hosts present: waiting for process 1 (10.0.0.3), which")


def test_without_process_0_the_others_say_so() -> None:
    (found,) = outcomes([1], 2, timeout=0.5)
    assert "process 1 of 2 found no process 0 at localhost:" in found


def test_what_hosts_disagree_on_is_named() -> None:
    facts = {0: {"seed": "0", "steps": "3"}, 1: {"seed": "0", "steps": "3"}}
    facts[2] = {"seed": "7", "steps": "3"}
    found = outcomes([0, 1, 2], 3, facts)
    assert len(set(found)) == 1
    assert "the hosts disagree on seed: 0 on process 0 (" in found[0]
    assert "), 7 on process 2 (" in found[0]


def test_two_processes_with_one_number_are_refused() -> None:
    found = outcomes([0, 1, 1], 3)
    assert len(set(found)) == 1
    assert "two processes have the number 1" in found[0]


def test_a_process_that_died_while_it_waited_is_missing_and_can_come_back() -> None:
    port = free_port()
    with ThreadPoolExecutor(4) as threads:
        server = threads.submit(outcomes, [0], 3, None, 20.0, port)
        hello = {"process_id": 1, "host": "a", "facts": {"the number of processes": "3"}}
        while True:
            try:
                died = socket.create_connection(("localhost", port), timeout=5)
                break
            except ConnectionRefusedError:
                continue
        for _ in range(5):  # so often that it comes back before it was found dead, too
            with died:
                died.sendall(json.dumps(hello).encode() + b"\n")
            died = socket.create_connection(("localhost", port), timeout=5)
        died.close()
        # With the dead one there would be three, and two with one number.
        assert outcomes([2, 1], 3, port=port) == ["", ""]
        assert server.result() == [""]


def test_long_facts_are_compared_and_shown_in_short() -> None:
    facts = {i: {"system_prompt": brief("x" * 2_000_000 + str(i))} for i in range(2)}
    (first, second) = outcomes([0, 1], 2, facts)
    assert first == second
    assert "disagree on system_prompt: xxx" in first
    assert len(first) < 1000


def test_other_programs_that_knock_are_ignored() -> None:
    port = free_port()

    def knock(line: bytes) -> bytes:
        while True:
            try:
                with socket.create_connection(("localhost", port), timeout=5) as connection:
                    connection.sendall(line)
                    return connection.recv(100)
            except ConnectionRefusedError:
                continue

    with ThreadPoolExecutor(4) as threads:
        server = threads.submit(outcomes, [0], 2, None, 20.0, port)
        assert knock(b"GET / HTTP/1.1\n") == b""
        assert knock(json.dumps({"process_id": 1}).encode() + b"\n") == b""
        assert outcomes([1], 2, port=port) == [""]
        assert server.result() == [""]


def test_a_port_in_use_is_said_to_be() -> None:
    with socket.create_server(("", 0)) as taken:
        (found,) = outcomes([0], 2, port=taken.getsockname()[1])
    assert "cannot listen on port" in found
    assert "choose another port" in found
