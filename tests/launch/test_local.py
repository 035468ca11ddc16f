"""A simulated pod."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_eqx.distributed.cluster import find_cluster

Launch = Callable[..., Any]
SHOW = "import json, os, sys; print(json.dumps([dict(os.environ), sys.argv[1:]]))"


def hosts(launch: Launch, *flags: str, arguments: tuple[str, ...] = ()) -> list[tuple[dict, list]]:
    """The environment and the arguments of every process."""
    done = launch("local", *flags, "--", sys.executable, "-c", SHOW, *arguments)
    assert done.code == 0
    lines = sorted(done.out.splitlines())
    assert [line[:4] for line in lines] == [f"[{i}] " for i in range(len(lines))]
    return [tuple(json.loads(line[4:])) for line in lines]


def test_every_process_knows_the_others_and_has_its_own_devices(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XLA_FLAGS")
    environments = [found for found, _ in hosts(launch, "--devices-per-process", "2")]
    clusters = [find_cluster(environment) for environment in environments]
    assert [c.process_id for c in clusters if c] == [0, 1, 2, 3]
    assert {(c.coordinator, c.num_processes) for c in clusters if c} == {
        (environments[0]["JAX_COORDINATOR_ADDRESS"], 4)
    }
    for environment in environments:
        assert environment["JAX_PLATFORMS"] == "cpu"
        assert environment["XLA_FLAGS"] == "--xla_force_host_platform_device_count=2"


def test_other_flags_of_xla_are_kept(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "XLA_FLAGS", "--xla_a=1 --xla_force_host_platform_device_count=64  --xla_b=2"
    )
    ((environment, _),) = hosts(launch, "--processes", "1", "--devices-per-process", "3")
    assert (
        environment["XLA_FLAGS"] == "--xla_a=1 --xla_b=2 --xla_force_host_platform_device_count=3"
    )


def test_arguments_arrive_as_they_are(launch: Launch, hostile: tuple[str, ...]) -> None:
    ((_, arguments),) = hosts(launch, "--processes", "1", arguments=hostile)
    assert arguments == list(hostile)


@pytest.mark.parametrize("flag", ["--processes", "--devices-per-process"])
def test_a_pod_of_nothing_is_refused(launch: Launch, flag: str) -> None:
    done = launch("local", flag, "0", "--", "true")
    assert (done.code, done.err) == (2, f"error: {flag} is 0: it must be at least 1.\n")


def test_the_exit_code_is_the_commands(launch: Launch) -> None:
    assert launch("local", "--processes", "2", "--", "sh", "-c", "exit 5").code == 5


COUNTED = "echo >> $0; exit $(( $(wc -l < $0) < 3 ? $1 : 0 ))"
"""A shell that succeeds at its third start, and else has the exit code of its argument."""


@pytest.mark.parametrize(
    ("code", "restarts", "starts", "final"),
    [
        (75, 5, 3, 0),  # preempted, and then done
        (1, 5, 3, 0),
        (1, 1, 2, 1),
        (1, 0, 1, 1),
        (2, 5, 1, 2),  # another start would find the same input
    ],
)
def test_what_fails_is_started_again(
    launch: Launch, tmp_path: Path, code: int, restarts: int, starts: int, final: int
) -> None:
    counted = ["sh", "-c", COUNTED, str(tmp_path / "starts"), str(code)]
    flags = ["--processes", "1", "--restarts", str(restarts)]
    done = launch("local", *flags, "--", *counted)
    assert done.code == final
    assert (tmp_path / "starts").read_text().count("\n") == starts
    again = [line for line in done.err.splitlines() if "starting all processes again" in line]
    assert len(again) == starts - 1


def test_a_command_that_does_not_exist_is_one_line(launch: Launch) -> None:
    done = launch("local", "--", "no-such-program")
    assert done.code == 2
    assert len(done.err.splitlines()) == 1
