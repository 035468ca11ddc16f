"""A run whose completions agents make is the same over several hosts."""

import json
from pathlib import Path
from typing import Any

import pytest

NAMES = (
    "completions/mean_length", "completions/clipped_ratio", "agents/requests", "agents/forks",
    "tools/num_lost", "reward", "loss",
)  # fmt: skip
pytestmark = [pytest.mark.slow, pytest.mark.grid("pods acting")]


def made(pod: Any, model: Path, out: Path, devices: list[int]) -> list[Any]:
    out.mkdir()
    for outcome in pod.run("harness_worker.py", devices, model, out, "asks_twice").values():
        assert outcome.code == 0, outcome.output
    return [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))]


def test_the_first_process_serves_and_all_draw(pod: Any, small_model: Path, tmp_path: Path) -> None:
    (alone,) = made(pod, small_model, tmp_path / "alone", [8])
    hosts = made(pod, small_model, tmp_path / "hosts", [4, 4])
    assert len(hosts) == 2
    assert any(line["agents/forks"] > 0 for line in alone["history"])
    for host in hosts:
        for own, expected in zip(host["history"], alone["history"], strict=True):
            for name in NAMES:
                assert own[name] == pytest.approx(expected[name], abs=1e-5), name
        for own, expected in zip(host["evaluations"], alone["evaluations"], strict=True):
            name = "eval/greedy/pass@1"
            assert own[name] == pytest.approx(expected[name], abs=1e-5)


def test_where_every_agent_fails_all_processes_end(
    pod: Any, small_model: Path, tmp_path: Path
) -> None:
    outcomes = pod.run("harness_worker.py", [4, 4], small_model, tmp_path, "fails")
    assert all(outcome.code == 1 for outcome in outcomes.values())
    assert "harness raised ValueError: no such page (harness_worker.py" in outcomes[0].output
    assert "no such page" in outcomes[1].output
