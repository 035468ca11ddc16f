"""A run whose completions a function makes is the same over several hosts."""

import json
from pathlib import Path
from typing import Any

import pytest

MEANS = "completions/mean_length", "completions/clipped_ratio"
pytestmark = [pytest.mark.slow, pytest.mark.grid("pods acting")]


def made(pod: Any, model: Path, out: Path, devices: list[int]) -> list[Any]:
    out.mkdir()
    for outcome in pod.run("rollout_func_worker.py", devices, model, out, "goes_on").values():
        assert outcome.code == 0, outcome.output
    return [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))]


def test_the_first_process_calls_the_function_for_all(
    pod: Any, small_model: Path, tmp_path: Path
) -> None:
    """Also for evaluations, whose last batch is filled up."""
    (alone,) = made(pod, small_model, tmp_path / "alone", [8])
    hosts = made(pod, small_model, tmp_path / "hosts", [4, 4])
    assert len(hosts) == 2
    for host in hosts:
        for own, expected in zip(host["history"], alone["history"], strict=True):
            for name in (*MEANS, "reward", "rewards/told/mean", "loss"):
                assert own[name] == pytest.approx(expected[name], abs=1e-5), name
        for own, expected in zip(host["evaluations"], alone["evaluations"], strict=True):
            for name in ("eval/greedy/pass@1", "eval/greedy/told"):
                assert own[name] == pytest.approx(expected[name], abs=1e-5)


def test_where_the_function_fails_all_processes_end(
    pod: Any, small_model: Path, tmp_path: Path
) -> None:
    outcomes = pod.run("rollout_func_worker.py", [4, 4], small_model, tmp_path, "fails")
    assert all(outcome.code == 1 for outcome in outcomes.values())
    assert "rollout_func raised ValueError: no such page (rollout_func_worker.py" in (
        outcomes[0].output
    )
    assert "no such page" in outcomes[1].output
