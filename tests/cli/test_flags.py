"""The command line: recipes as starting points."""

import dataclasses
import sys
from pathlib import Path
from typing import Any, Literal

import pytest

from grpo_eqx import GRPOConfig, cli, recipes
from grpo_eqx.common.errors import RewardError, RewardFailureError, RunError, UserError
from grpo_eqx.data.prompts import Prompt
from grpo_eqx.rewards import RewardRunner


@dataclasses.dataclass(frozen=True, kw_only=True)
class Own(GRPOConfig):
    """A config with fields of its own."""

    penalty: float = 0.5
    """Weight of the penalty."""
    style: Literal["short", "long"] | None = None
    steps: int = 7


def config_of(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> GRPOConfig:
    """The config that a command line describes."""
    configs: list[GRPOConfig] = []
    monkeypatch.setattr(sys, "argv", ["script.py", *arguments])
    cli.run(configs.append)
    return configs[0]


def test_without_flags_it_is_the_default_config(monkeypatch: pytest.MonkeyPatch) -> None:
    assert config_of(monkeypatch) == GRPOConfig()


@pytest.mark.parametrize("flag", [["--recipe", "dapo"], ["--recipe=dapo"]])
def test_a_recipe_gives_the_defaults_and_flags_change_them(
    monkeypatch: pytest.MonkeyPatch, flag: list[str]
) -> None:
    assert config_of(monkeypatch, *flag) == recipes.dapo()
    changed = config_of(monkeypatch, "--steps", "7", *flag, "--epsilon-high", "0.3")
    assert changed == recipes.dapo(steps=7, epsilon_high=0.3)


def test_flags_override_a_file_which_overrides_a_recipe(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("recipe: dapo\nepsilon_high: 0.3\nsteps: 7\n")
    flags = "--config", str(path)
    assert config_of(monkeypatch, *flags) == recipes.dapo(epsilon_high=0.3, steps=7)
    assert config_of(monkeypatch, *flags, "--steps", "9").steps == 9
    # A recipe on the command line takes the place of the file's.
    gspo = config_of(monkeypatch, *flags, "--recipe", "gspo", "--epsilon-high", "0.5")
    assert gspo == recipes.gspo(epsilon_high=0.5, steps=7)


def test_a_setting_that_is_on_by_default_can_be_turned_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flags = "--recipe", "dapo", "--no-dynamic-sampling"
    assert config_of(monkeypatch, *flags) == recipes.dapo(dynamic_sampling=False)


def test_a_file_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("recipe: ppo")
    with pytest.raises(SystemExit) as stop:
        config_of(monkeypatch, "--config", str(path))
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("error: recipe is 'ppo' in ")


def test_the_config_can_be_printed_instead(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["script.py", "--steps", "7", "--print-config"])
    cli.run(lambda cfg: pytest.fail("the run starts"))
    path = tmp_path / "run.yaml"
    path.write_text(capsys.readouterr().out)
    assert config_of(monkeypatch, "--config", str(path)) == GRPOConfig(steps=7)


def test_an_unknown_recipe_is_refused_with_those_there_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        config_of(monkeypatch, "--recipe", "ppo")
    assert stop.value.code == 2
    assert "dr_grpo" in capsys.readouterr().err


def test_what_a_recipe_does_not_go_with_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        config_of(monkeypatch, "--recipe", "gspo", "--loss-type", "sapo")
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: epsilon is 0.0003 with loss_type sapo")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UserError("x"), 2),
        (RewardError("x"), 2),
        (RunError("x"), 1),
        (RewardFailureError("x"), 1),  # it may pass the next time
    ],
)
def test_an_error_ends_a_script_with_its_line_and_its_code(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    code: int,
) -> None:
    def main(cfg: GRPOConfig) -> None:
        raise error

    monkeypatch.setattr(sys, "argv", ["script.py"])
    with pytest.raises(SystemExit) as stop:
        cli.run(main)
    assert stop.value.code == code
    assert capsys.readouterr().err == "error: x\n"


def test_a_flag_of_another_library_is_answered_by_ours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        config_of(monkeypatch, "--steps", "7", "--max-completion_tokens=3", "--max_steps=3")
    assert stop.value.code == 2
    assert capsys.readouterr().err == (
        "error: max_completion_tokens is an unknown setting: did you mean max_completion_length? "
        "max_steps is an unknown setting: use steps, which counts rollouts.\n"
    )


def test_an_error_of_a_users_function_comes_with_the_users_frames(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def faulty(**columns: object) -> list[float]:
        return [helper()]

    def helper() -> float:
        raise KeyError("gold")

    def main(cfg: GRPOConfig) -> None:
        RewardRunner({"faulty": faulty})([Prompt("?", {})], [["x"]], [[[1]]])

    monkeypatch.setattr(sys, "argv", ["script.py"])
    with pytest.raises(SystemExit):
        cli.run(main)
    *frames, line = capsys.readouterr().err.splitlines()
    assert line.startswith("error: reward function faulty raised KeyError: 'gold' (test_flags.py")
    places = [frame for frame in frames if frame.startswith("  File")]
    assert [place.rpartition(" in ")[2] for place in places] == ["faulty", "helper"]


def own_config_of(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Own:
    """The config that a command line describes for a function that takes a subclass."""
    configs: list[Own] = []

    def main(cfg: Own) -> None:
        configs.append(cfg)

    monkeypatch.setattr(sys, "argv", ["script.py", *arguments])
    cli.run(main)
    return configs[0]


def test_a_subclass_of_the_config_has_flags_for_its_fields(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert own_config_of(monkeypatch) == Own()
    path = tmp_path / "run.yaml"
    path.write_text("penalty: 2\n")
    flags = "--config", str(path), "--style", "long"
    assert own_config_of(monkeypatch, *flags) == Own(penalty=2.0, style="long")
    with pytest.raises(SystemExit):
        own_config_of(monkeypatch, "--penalty", "x")
    assert capsys.readouterr().err == "error: penalty is 'x': use a number.\n"
    with pytest.raises(SystemExit):
        own_config_of(monkeypatch, "--help-all")
    said = " ".join(capsys.readouterr().out.split())
    assert "--penalty FLOAT Weight of the penalty. (default: 0.5)" in said
    assert "--style CHOICE (short, long)" in said
    assert said.count("--steps INT") == 1
    with pytest.raises(SystemExit):
        own_config_of(monkeypatch, "--help")
    brief = capsys.readouterr().out
    assert "--penalty FLOAT" in brief
    assert brief.count("--steps INT") == 1


def test_a_subclass_that_is_no_dataclass_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Undecorated(GRPOConfig):
        penalty: float = 0.5

    def main(cfg: Undecorated) -> None:
        raise NotImplementedError

    main.__annotations__["cfg"] = Undecorated
    monkeypatch.setattr(sys, "argv", ["script.py", "--penalty", "1"])
    with pytest.raises(SystemExit):
        cli.run(main)
    assert "Undecorated has fields, but is not a dataclass: put @" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "default", "message"),
    [
        (list[str], None, "Bad.field is of a type that no flag has: make it int, float, "),
        (int, dataclasses.MISSING, "Bad.field has no default, which a flag needs: give it one."),
    ],
)
def test_a_field_that_can_be_no_flag_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kind: Any,
    default: Any,
    message: str,
) -> None:
    bad = dataclasses.make_dataclass(
        "Bad", [("field", kind, dataclasses.field(default=default))],
        bases=(GRPOConfig,), frozen=True, kw_only=True,
    )  # fmt: skip

    def main(cfg: GRPOConfig) -> None:
        pytest.fail("the run starts")

    main.__annotations__["cfg"] = bad
    monkeypatch.setattr(sys, "argv", ["script.py"])
    with pytest.raises(SystemExit) as stop:
        cli.run(main)
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")
