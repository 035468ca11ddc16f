"""A run is the same run on one device, on many, and over several hosts."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.grid("pods train")]

OF_THE_MACHINE = ("time/", "throughput/", "memory/", "perf/", "compile/", "step_time")


def trained(
    pod: Any, model: Path, out: Path, devices: list[int], settings: str, runs: list[str]
) -> list[Any]:
    """What every process made of every run, each a mesh and a rollout sharding.

    **Arguments:** the pod; the model; a new folder; the devices of each process; settings of the
    config, in JSON; the runs.
    """
    out.mkdir()
    for outcome in pod.run("train_worker.py", devices, model, out, settings, *runs).values():
        assert outcome.code == 0, outcome.output
    made = [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))]
    assert len(made) == len(devices) * len(runs)
    return made


@pytest.fixture(scope="module")
def on_one_device(
    pod: Any, small_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Any]:
    """Makes the run of some settings on one device; once for each."""

    @functools.cache
    def make(settings: str) -> Any:
        out = tmp_path_factory.mktemp("alone") / "out"
        return trained(pod, small_model, out, [1], settings, ["auto/legacy"])[0]

    return make


@pytest.mark.grid
@pytest.mark.parametrize(
    ("devices", "settings", "runs"),
    [
        # Each compiles for minutes: on one host, every mesh with every rollout sharding is compared
        # program by program in tests/training.
        ([4, 4], {"beta": 0.05}, ["auto/tensor:2"]),
        ([4, 4], {"beta": 0.05, "lora_rank": 4}, ["2,2,2/legacy"]),
        ([2] * 4, {}, ["host_local/replicated"]),
        pytest.param(
            [8],
            {},
            ["auto/legacy", "2,4,1/maxtext", "1,4,2/legacy", "1,4,2/tensor:4", "1,1,2 of 2/legacy"],
            marks=pytest.mark.long,
        ),
        pytest.param([4, 4], {"beta": 0.05, "lora_rank": 4}, ["auto/auto"], marks=pytest.mark.long),
        pytest.param(
            [4] * 4, {}, ["host_local/tensor:4", "host_local/maxtext"], marks=pytest.mark.long
        ),
    ],
    ids=[
        "2 hosts",
        "2 hosts, adapters",
        "4 hosts",
        "1 host",
        "2 hosts, adapters, more",
        "4 hosts, more",
    ],
)
def test_devices_and_hosts_leave_a_run_unchanged(
    pod: Any,
    small_model: Path,
    on_one_device: Callable[[str], Any],
    tmp_path: Path,
    devices: list[int],
    settings: dict[str, Any],
    runs: list[str],
) -> None:
    described = json.dumps(settings)
    alone = on_one_device(described)
    assert len(np.unique([metrics["reward"] for metrics in alone["history"]])) == 3
    for made in trained(pod, small_model, tmp_path / "out", devices, described, runs):
        check_same(made, alone)


def test_hosts_leave_a_run_that_carries_completions_over_unchanged(
    pod: Any, small_model: Path, tmp_path: Path
) -> None:
    """On the same mesh: on another one, groups become whole in another order."""
    settings = {
        "max_staleness": 1, "importance_sampling_mode": "token_truncate", "max_num_seqs": 16,
        "max_completion_length": 24, "stop_strings": ["e"], "steps": 4,
    }  # fmt: skip
    (alone,), hosts = (
        trained(
            pod, small_model, tmp_path / name, devices, json.dumps(settings), ["auto/replicated"]
        )
        for name, devices in (("alone", [8]), ("hosts", [4, 4]))
    )
    assert max(metrics["staleness/max"] for metrics in alone["history"]) == 1
    for made in hosts:
        check_same(made, alone)


@pytest.mark.parametrize(
    ("max_staleness", "devices"),
    [(0, [2, 2, 2, 2]), (1, [1, 1]), (3, [2, 2, 2, 2])],
    ids=["in turn", "one each", "ahead"],
)
def test_hosts_leave_a_run_unchanged_that_samples_on_other_devices(
    pod: Any, small_model: Path, tmp_path: Path, max_staleness: int, devices: list[int]
) -> None:
    """Half of the hosts train, the others sample."""
    number = sum(devices)
    settings: dict[str, Any] = {
        "rollout_devices": number // 2, "max_completion_length": 24, "stop_strings": ["e"],
        "steps": 3,
    }  # fmt: skip
    if max_staleness:
        settings |= {"max_staleness": max_staleness, "importance_sampling_mode": "token_truncate"}
    (alone,), hosts = (
        trained(
            pod, small_model, tmp_path / name, number_of_each, json.dumps(settings),
            ["auto/replicated"],
        )
        for name, number_of_each in (("alone", [number]), ("hosts", devices))
    )  # fmt: skip
    for made in hosts:
        check_same(made, alone)


def check_same(made: Any, alone: Any) -> None:
    assert made["tokens"] == alone["tokens"]
    for metrics, expected in zip(made["history"], alone["history"], strict=True):
        assert metrics.keys() == expected.keys()
        for name, value in expected.items():
            if name.startswith(OF_THE_MACHINE):
                continue
            if name.startswith("reward"):
                assert metrics[name] == value
            rtol = 0.0 if name == "loss" else 1e-4
            np.testing.assert_allclose(metrics[name], value, rtol=rtol, atol=1e-5, err_msg=name)
