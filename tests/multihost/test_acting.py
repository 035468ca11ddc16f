"""A run in environments is the same over several hosts."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.environments.templates import HERMES

pytestmark = [pytest.mark.slow, pytest.mark.grid("pods acting")]


def made(pod: Any, model: Path, out: Path, devices: list[int]) -> list[Any]:
    out.mkdir()
    (out / "template").write_text(HERMES)
    for outcome in pod.run("acting_worker.py", devices, model, out).values():
        assert outcome.code == 0, outcome.output
    return [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))]


def test_hosts_leave_a_run_in_environments_unchanged(
    pod: Any, small_model: Path, tmp_path: Path
) -> None:
    """Also evaluations whose last batch is filled up, and environments that fail."""
    (alone,) = made(pod, small_model, tmp_path / "alone", [8])
    hosts = made(pod, small_model, tmp_path / "hosts", [4, 4])
    names = (
        "reward", "rewards/seen/mean", "rewards/Echo/mean", "completions/mean_length",
        "tools/turns", "tools/num_lost", "loss",
    )  # fmt: skip
    for line in alone["history"]:
        assert line["tools/turns"] > 0
    assert any(line["tools/num_lost"] > 0 for line in alone["history"])
    for host in hosts:
        for own, expected in zip(host["history"], alone["history"], strict=True):
            for name in names:
                assert own[name] == pytest.approx(expected[name], abs=1e-5), name
        for own, expected in zip(host["evaluations"], alone["evaluations"], strict=True):
            for name in ("eval/greedy/pass@1", "eval/greedy/seen"):
                assert own[name] == pytest.approx(expected[name], abs=1e-6), name
    assert alone["evaluations"]
