"""The command `grpo-eqx train`."""

import sys
from pathlib import Path

import numpy as np
import pytest

from grpo_eqx import GRPOConfig
from grpo_eqx.cli.main import main
from grpo_eqx.evaluation.result import Evaluation
from grpo_eqx.loop.fit_result import FitResult


def train(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Its exit code."""
    monkeypatch.setattr(sys, "argv", ["grpo-eqx", "train", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code


@pytest.fixture
def configs(monkeypatch: pytest.MonkeyPatch) -> list[GRPOConfig]:
    """The configs of all trainers that are made, which train nothing."""
    made = []

    class Trainer:
        can_evaluate = True

        def __init__(self, cfg):
            self.cfg = cfg
            made.append(cfg)

        def fit(self):
            return FitResult(Path("runs/x"), [{}, {}], 3.0)

        def evaluate(self):
            return Evaluation(np.array([[True], [True], [False], [True]]))

    monkeypatch.setattr("grpo_eqx.trainer.GRPOTrainer", Trainer)
    return made


def test_it_trains_with_the_flags_settings(monkeypatch, capsys, configs) -> None:
    assert train(monkeypatch, "--steps", "2") == 0
    assert configs == [GRPOConfig(steps=2)]
    assert capsys.readouterr().out == "2 steps in 3 s; the run is in runs/x\n"


def test_held_out_problems_that_are_asked_for_are_evaluated(monkeypatch, capsys, configs) -> None:
    assert train(monkeypatch, "--steps", "2", "--eval-problems", "4") == 0
    evaluation, _ = capsys.readouterr().out.splitlines()
    assert evaluation == "75.0% (30.1-95.4) correct on 4 problems, greedy"


def test_mistakes_are_one_line(monkeypatch, capsys) -> None:
    assert train(monkeypatch, "--mesh", "3,1,1") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: mesh 3,1,1")
