"""Help on a run's flags: the essentials on a screen, all of them by group."""

import dataclasses
import sys
from collections.abc import Callable

import pytest

from grpo_eqx import GRPOConfig
from grpo_eqx.cli.help import ESSENTIALS, groups_of, placeholder
from grpo_eqx.cli.main import main
from grpo_eqx.cli.plan import Plan
from grpo_eqx.cli.train import Train


@pytest.fixture
def shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Runs the command in a terminal of some width; returns what it prints."""

    def run(*arguments: str, columns: int = 80) -> str:
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr(sys, "argv", ["grpo-eqx", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 0
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("command", ["train", "plan", "compile"])
def test_the_essentials_fit_a_screen(shown: Callable[..., str], command: str, columns: int) -> None:
    lines = shown(command, "--help", columns=columns).splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= min(columns, 100)
    essential = "--price-per-device-hour FLOAT" if command == "plan" else "--learning-rate FLOAT"
    assert essential in " ".join(lines)
    assert ("--reward-funcs" in " ".join(lines)) == (command != "plan")
    assert "--sapo-temperature-pos" not in " ".join(lines)


def test_all_flags_are_in_a_group_and_shown_once(shown: Callable[..., str]) -> None:
    names = [name for group in groups_of(Train).values() for name in group]
    assert sorted(names) == sorted(field.name for field in dataclasses.fields(Train))
    text = shown("train", "--help-all", columns=100)
    for name in names:
        assert text.count(f"  --{name.replace('_', '-')} ") == 1, name
    assert set(ESSENTIALS) <= {*names, *(field.name for field in dataclasses.fields(Plan))}


def test_a_group_can_be_asked_for(shown: Callable[..., str]) -> None:
    text = shown("train", "--help", "kl")
    assert "--beta FLOAT" in text
    assert "(k1, k2, k3)" in text
    assert "--model" not in text


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("steps", "INT"),
        ("learning_rate", "FLOAT"),
        ("model", "TEXT"),
        ("reward_funcs", "TEXT ..."),
        ("reward_weights", "FLOAT ..."),
        ("loss_type", "CHOICE"),
        ("remat", "CHOICE"),
        ("dynamic_sampling", ""),
        ("micro_batch_size_per_device", "INT"),
    ],
)
def test_placeholders_are_plain(name: str, expected: str) -> None:
    assert placeholder(GRPOConfig, name) == expected


def test_an_unknown_group_is_answered_by_those_there_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["grpo-eqx", "train", "--help", "losses"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert "error: --help has no group 'losses': use one of model, " in capsys.readouterr().err
