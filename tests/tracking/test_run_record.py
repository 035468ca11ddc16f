"""The record of a run: evaluations beside steps, the curve on the way, and warnings in words."""

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from grpo_eqx import GRPOConfig
from grpo_eqx.common.errors import RunError
from grpo_eqx.sharding.layout_report import LayoutReport
from grpo_eqx.tracking import Tracker, run_record
from grpo_eqx.tracking.recorded_run import RecordedRun
from grpo_eqx.tracking.run_record import RunRecord


class Recorder(Tracker):
    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.logged.append((step, metrics))

    def finish(self) -> None:
        pass


def metrics(**others: float) -> dict[str, float]:
    return {
        "reward": 0.5,
        "reward_std": 0.2,
        "rewards/correct/mean": 0.5,
        "rewards/correct/std": 0.1,
        "completions/mean_length": 7.0,
        "completions/clipped_ratio": 0.0,
        "step_time": 1.0,
        "compile/num_programs": 0.0,
        **others,
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


def record(folder: Path, *trackers: Tracker, step: int = 0, **settings: Any) -> RunRecord:
    cfg = GRPOConfig(output_dir=folder, **settings).resolved()
    layout = LayoutReport(1, 1, "cpu", {"dp": 1, "fsdp": 1, "tp": 1}, "legacy", 0, 0, 0)
    return RunRecord(cfg, layout, trackers, step=step, continued=step > 0)


def test_what_was_passed_is_recorded_in_place_of_the_settings(folder: Path) -> None:
    cfg = GRPOConfig(output_dir=folder).resolved()
    layout = LayoutReport(1, 1, "cpu", {"dp": 1, "fsdp": 1, "tp": 1}, "legacy", 0, 0, 0)
    passed = {
        "data": "Dataset, passed to GRPOTrainer",
        "reward_funcs": "judge, passed to GRPOTrainer",
    }
    with RunRecord(cfg, layout, passed=passed) as run:
        run.step(1, metrics())
    settings = RecordedRun.read(folder).settings
    assert {name: settings[name] for name in passed} == passed
    assert settings["seed"] == cfg.seed
    with record(folder, step=1):  # goes on without them
        pass
    assert RecordedRun.read(folder).settings["reward_funcs"] == list(cfg.reward_funcs)


def rows(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_evaluations_are_lines_of_their_own_and_reach_all_trackers(folder: Path) -> None:
    tracker, solved = Recorder(), {"eval/greedy/pass@1": 0.25}
    with record(folder, tracker) as run:
        run.evaluation(0, solved)
        run.step(1, metrics())
    assert rows(folder) == [{"step": 0, **solved}, {"step": 1, **metrics()}]
    assert tracker.logged == [(0, solved), (1, metrics())]
    assert [row["reward"] for row in run.history] == [0.5]


def test_lines_are_on_the_disk_before_a_checkpoint_counts_on_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, sync = list[Path](), os.fsync

    def recorded(descriptor: int) -> None:
        sync(descriptor)
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))

    monkeypatch.setattr(os, "fsync", recorded)
    with record(folder) as run:
        assert {folder / "config.json.tmp", folder / "layout.json.tmp", folder} <= set(synced)
        synced.clear()
        table = folder / "completions" / "step_000001.parquet"
        run.completions({"step": [1], "completion": ["a"]}, {})
        run.step(1, metrics())
        assert synced == []  # no step waits for a slow disk
        run.sync()
        assert synced == [table, table.parent, folder / "metrics.jsonl"]
        synced.clear()
        run.sync()
        assert synced == [folder / "metrics.jsonl"]
        assert [row["step"] for row in rows(folder)] == [1]
        assert table.exists()


def test_a_table_that_somebody_deletes_ends_no_run(folder: Path) -> None:
    with record(folder) as run:
        run.completions({"step": [1], "completion": ["a"]}, {})
        run.flush()
        (folder / "completions" / "step_000001.parquet").unlink()
        run.sync()
        run.step(1, metrics())


def test_what_a_resumed_run_lacks_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row without a reward, and others that rules expect, ended the run in a traceback."""
    with record(folder) as run:
        for step in (1, 2, 3):
            run.step(step, metrics())
    lines = (folder / "metrics.jsonl").read_bytes().splitlines()
    strange = b'{"step": 2, "step_time": 1.0}'
    (folder / "metrics.jsonl").write_bytes(b"\n".join([bytes(9), strange, lines[2], b""]))
    with record(folder, step=3) as run:
        assert len(run.history) == 2
        run.step(4, metrics())
    said = capsys.readouterr().out.replace("\n", " ")
    assert (
        "warning: metrics.jsonl has 1 line that is damaged or repeated (1) and no line of" in said
    )
    assert [row["step"] for row in rows(folder)] == [2, 3, 4]


def test_an_evaluation_after_the_end_is_recorded_once(folder: Path) -> None:
    tracker, solved = Recorder(), {"eval/greedy/pass@1": 0.5}
    with record(folder, tracker) as run:
        run.step(1, metrics())
    run.evaluation(1, solved)
    run.evaluation(1, solved)
    assert rows(folder)[1:] == [{"step": 1, **solved}]
    assert len(tracker.logged) == 1  # it has finished


def test_a_run_that_is_resumed_keeps_its_evaluations_and_its_steps_apart(folder: Path) -> None:
    with record(folder) as run:
        run.evaluation(0, {"eval/greedy/pass@1": 0.25})
        run.step(1, metrics())
        run.step(2, metrics())
        run.evaluation(2, {"eval/greedy/pass@1": 0.5})
    with record(folder, step=1) as resumed:
        assert len(resumed.history) == 1
    assert [row["step"] for row in rows(folder)] == [0, 1]


def test_an_evaluation_that_cannot_be_written_is_a_warning(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with record(folder) as run:
        run.step(1, metrics())
    (folder / "metrics.jsonl").unlink()
    (folder / "metrics.jsonl").mkdir()
    run.evaluation(1, {"eval/greedy/pass@1": 0.5})
    assert "warning: an evaluation is not recorded" in capsys.readouterr().out


def test_the_learning_curve_is_drawn_while_the_run_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_record, "_FIRST_PLOT_S", 0.0)
    with record(folder) as run:
        run.step(1, metrics())
        early = (folder / "learning_curve.png").read_bytes()
        run.step(2, metrics(reward=0.9))
        # Drawing took some time, so that it is not due again.
        assert (folder / "learning_curve.png").read_bytes() == early
    assert (folder / "learning_curve.png").read_bytes() != early


@pytest.mark.parametrize(
    ("others", "said"),
    [
        ({}, None),
        ({"completions/clipped_ratio": 0.75}, "75% of the completions of steps 1 to 3 were cut"),
        ({"reward": float("nan")}, "No completion had a reward, so steps 1 to 2 trained nothing"),
        (
            {"rewards/correct/std": 0.0},
            "Reward function correct returned 0.5 for all completions of steps 1 to 2",
        ),
        (
            {"rewards/correct/mean": 0.0, "rewards/correct/std": 0.0},
            "Reward function correct returned 0 for all completions of steps 1 to 2",
        ),
        (
            {"rewards/judge/mean": float("nan"), "rewards/judge/std": float("nan")},
            "Reward function judge returned None for all completions of steps 1 to 5",
        ),
        ({"reward_std": float("inf")}, "The rewards of steps 1 to 2 are too large for float32"),
        ({"rewards/soft_overlong/mean": 0.0, "rewards/soft_overlong/std": 0.0}, None),
    ],
)
def test_what_is_sick_is_said_once_in_words_with_advice(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    others: dict[str, float],
    said: str | None,
) -> None:
    with record(folder) as run:
        for step in range(1, 6):
            run.step(step, metrics(**others))
    warnings = [line for line in capsys.readouterr().out.splitlines() if "warning: " in line]
    assert len(warnings) == (said is not None)
    assert all(str(said) in line and line.endswith(".") for line in warnings)


def test_the_reward_of_an_environment_is_told_as_its_own_while_the_run_goes_on(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = GRPOConfig(output_dir=folder).resolved()
    layout = LayoutReport(1, 1, "cpu", {"dp": 1, "fsdp": 1, "tp": 1}, "legacy", 0, 0, 0)
    passed = {"environment_factory": "Maze, passed to GRPOTrainer"}
    with RunRecord(cfg, layout, passed=passed) as run:
        for step in (1, 2):
            run.step(step, metrics(**{"rewards/Maze/mean": 0.0, "rewards/Maze/std": 0.0}))
    assert "warning: Environment Maze gave the reward 0" in capsys.readouterr().out


def test_a_fall_of_evaluations_is_said_when_it_is_recorded(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with record(folder) as run:
        run.evaluation(0, {"eval/greedy/pass@1": 0.8, "eval/num_problems": 512.0})
        run.step(1, metrics())
        run.evaluation(1, {"eval/greedy/pass@1": 0.2, "eval/num_problems": 512.0})
        assert "warning: Pass@1 (eval/greedy/pass@1) fell from 0.8" in capsys.readouterr().out


def test_completions_are_a_table_and_some_of_them_are_printed_where_asked(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    columns = {
        "step": [7] * 3, "prompt": ["1 + 1?"] * 3, "completion": ["two", "2", "\x1b[2J"],
        "reward": [0.0, 1.0, 0.5], "advantage": [-1.0, 1.0, 0.0],
    }  # fmt: skip
    with record(folder) as run:
        run.completions(columns, {"tokens": [["two"], ["2"], ["?"]]})
    assert (folder / "completions" / "step_000007.parquet").exists()
    assert "two" not in capsys.readouterr().out
    with record(folder, log_completions=True, num_completions_to_print=2) as run:
        run.completions(columns, {})
    said = capsys.readouterr().out
    assert "step 7: 2 of 3 completions, from the best to the worst" in said
    assert said.index("  2  ") < said.index("  two  ")


def writer(write: Callable[[], None]) -> Callable[..., None]:
    return lambda path, columns: write()


def test_a_run_goes_on_while_a_table_is_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end, ended = threading.Event(), threading.Event()

    def write() -> None:
        assert may_end.wait(60)
        ended.set()

    monkeypatch.setattr(run_record, "write_completions", writer(write))
    with record(folder) as run:
        run.step(1, metrics())
        run.completions({"step": [1], "reward": [0.5]}, {})
        assert not ended.is_set()
        may_end.set()
        run.flush()
        assert ended.is_set()


def test_a_table_that_cannot_be_written_ends_the_run_at_its_next_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write() -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_record, "write_completions", writer(write))
    with record(folder) as run:
        run.completions({"step": [1], "reward": [0.5]}, {})
        with pytest.raises(RunError, match=r"No space left on device\): free space"):
            run.step(2, metrics())
    with pytest.raises(RunError, match="No space left"), record(folder) as run:
        run.completions({"step": [1], "reward": [0.5]}, {})


def test_a_table_that_cannot_be_written_does_not_hide_why_the_run_ends(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write() -> None:
        raise ValueError("a lone surrogate")

    monkeypatch.setattr(run_record, "write_completions", writer(write))

    def stop(run: RunRecord) -> None:
        run.completions({"step": [1], "reward": [0.5]}, {})
        raise SystemExit(75)

    with pytest.raises(SystemExit), record(folder) as run:
        stop(run)


def test_a_tracker_that_changes_the_table_changes_its_own(folder: Path) -> None:
    class Reversing(Recorder):
        def completions(self, step: int, table: Any) -> None:
            table["reward"].reverse()

    columns = {"step": [1, 1], "prompt": ["a", "b"], "reward": [0.0, 1.0]}
    with record(folder, Reversing()) as run:
        run.completions(columns, {})
    (path,) = (folder / "completions").iterdir()
    assert pq.read_table(path)["reward"].to_pylist() == [0.0, 1.0]
