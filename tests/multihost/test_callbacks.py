"""Callbacks and evaluations on two hosts: one answer for both."""

import json
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.slow
def test_what_process_0_responds_is_what_all_do(
    pod: Any, small_model: Path, tmp_path: Path
) -> None:
    for outcome in pod.run("callback_worker.py", [2, 2], small_model, tmp_path).values():
        assert outcome.code == 0, outcome.output
    one, other = (json.loads((tmp_path / f"{i}.json").read_text()) for i in range(2))
    assert one == other
    assert (one["steps"], one["index"]) == ([1, 2], [0, 0])
    assert one["stopped"] == "Differs: process 0"
    (evaluation,) = one["evaluations"]
    assert evaluation["eval/temperature_1/words"] > 0
    # The command, also on two hosts, which knows no functions of the user's own.
    metrics = json.loads((tmp_path / "results.json").read_text())["metrics"]
    own = {name: x for name, x in evaluation.items() if "words" not in name and name != "step"}
    assert metrics == own
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    assert len(lines) == 2 * metrics["eval/num_problems"]
