"""The command `grpo-eqx train`."""

import sys
from pathlib import Path

import pytest

from grpo_eqx import GRPOConfig
from grpo_eqx.cli.main import main
from grpo_eqx.trainer import FitResult


def train(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Its exit code."""
    monkeypatch.setattr(sys, "argv", ["grpo-eqx", "train", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code


def test_it_trains_with_the_flags_settings(monkeypatch, capsys) -> None:
    configs = []

    class Trainer:
        def __init__(self, cfg):
            self.cfg = cfg
            configs.append(cfg)

        def fit(self):
            return FitResult(Path("runs/x"), [{}, {}], 3.0)

    monkeypatch.setattr("grpo_eqx.trainer.GRPOTrainer", Trainer)
    assert train(monkeypatch, "--steps", "2") == 0
    assert configs == [GRPOConfig(steps=2)]
    assert capsys.readouterr().out == "2 steps in 3 s; the run is in runs/x\n"


def test_mistakes_are_one_line(monkeypatch, capsys) -> None:
    assert train(monkeypatch, "--mesh", "3,1,1") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: mesh 3,1,1")
