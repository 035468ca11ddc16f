"""The command `grpo-eqx check`."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from grpo_eqx.cli.main import main

from ..tracking.diagnosis.histories import SETTINGS, Value, evaluated, steps_of

Check = Callable[[Path], tuple[int, str]]


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Check:
    """Runs `grpo-eqx check RUN`; returns its exit code and what it prints."""

    def call(run: Path) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["grpo-eqx", "check", str(run)])
        with pytest.raises(SystemExit) as end:
            main()
        output = capsys.readouterr()
        return int(end.value.code or 0), output.out + output.err

    return call


def written(folder: Path, number: int = 40, **metrics: Value) -> Path:
    """The folder of a run with a synthetic history."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SETTINGS))
    rows = [*steps_of(number, **metrics), *evaluated((number, 0.5))]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_sick_run_is_told_with_numbers_and_advice_and_exits_with_1(
    check: Check, tmp_path: Path
) -> None:
    code, said = check(written(tmp_path / "run", **{"completions/clipped_ratio": 0.75}))
    assert code == 1
    assert said.splitlines()[0] == "run: sick after 40 steps and 1 evaluation"
    assert "sick  truncated, since step 3\n" in said
    assert "75% of the completions of steps 1 to 3 were cut off at max_completion_length" in said
    assert "To do: Raise max_completion_length" in said
    assert "note  loss_near_0, step 3\n" in said
    assert "healthy" not in said


def test_what_is_over_is_told_with_its_end(check: Check, tmp_path: Path) -> None:
    clipped: Mapping[str, Value] = {
        "completions/clipped_ratio": lambda step: 0.75 if step < 20 else 0.0
    }
    code, said = check(written(tmp_path / "run", **clipped))
    assert code == 1
    assert "sick  truncated, from step 3 to 19\n" in said


def test_a_healthy_run_says_what_was_checked_and_exits_with_0(check: Check, tmp_path: Path) -> None:
    code, said = check(written(tmp_path / "run"))
    assert code == 0
    assert said.startswith("run: healthy after 40 steps")
    (line,) = [line for line in said.splitlines() if line.startswith("healthy")]
    assert "rules found nothing: reward_none, " in line
    assert "kl_blow_up" in line
    assert "evaluation_falls" not in line  # one evaluation is no fall


def test_what_was_found_is_not_among_what_was_not(check: Check, tmp_path: Path) -> None:
    solved: Mapping[str, Value] = {
        "reward": lambda step: min(1.0, 0.3 + 0.05 * step),
        "reward_std": lambda step: 0.48 if step < 14 else 0.0,
        "rewards/correct/std": lambda step: 0.48 if step < 14 else 0.0,
        "frac_reward_zero_std": lambda step: 0.3 if step < 14 else 1.0,
    }
    code, said = check(written(tmp_path / "run", **solved))
    assert code == 0
    assert "note  groups_without_variance" in said
    (line,) = [line for line in said.splitlines() if line.startswith("healthy")]
    assert "groups_without_variance" not in line


def test_a_run_that_goes_on_is_read_up_to_its_last_whole_line(check: Check, tmp_path: Path) -> None:
    run = written(tmp_path / "run", number=0)
    (run / "metrics.jsonl").write_text("")
    assert check(run) == (0, "run: no step is recorded yet\n")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(steps_of(1)[0]) + '\n{"step": 2, "rew')
    code, said = check(run)
    assert code == 0
    assert "run: healthy after 1 step and 0 evaluations" in said
    assert "healthy  1 rule found nothing: skipped_updates" in said
    assert "unknown  rules that look at more steps: reward_none (5), " in said


def test_a_folder_that_is_no_run_is_refused(check: Check, tmp_path: Path) -> None:
    code, said = check(tmp_path)
    assert code == 2
    assert said.startswith("error: ")
    assert "is not a run folder" in said


def test_jax_is_not_imported_for_a_folder_that_was_copied(tmp_path: Path) -> None:
    run = written(tmp_path / "run")
    (tmp_path / "elsewhere").mkdir()
    copy = Path(shutil.move(run, tmp_path / "elsewhere"))
    (tmp_path / "jax.py").write_text("raise ImportError('JAX is not needed')")
    done = subprocess.run(
        [sys.executable, "-m", "grpo_eqx", "check", str(copy)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "healthy" in done.stdout
