"""Trackers of a run: which there are, and that none but `metrics.jsonl` ends it."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from grpo_eqx import GRPOConfig
from grpo_eqx.common.errors import RunError, UserError
from grpo_eqx.sharding.layout_report import LayoutReport
from grpo_eqx.tracking import JsonlTracker, Tracker, run_trackers
from grpo_eqx.tracking.run_record import RunRecord
from grpo_eqx.tracking.run_trackers import GuardedTracker

LAYOUT = LayoutReport(1, 1, "cpu", {"dp": 1, "fsdp": 1, "tp": 1}, "legacy", 0, 0, 0)
METRICS = {
    "reward": 0.5, "reward_std": 0.2, "completions/mean_length": 7.0,
    "completions/clipped_ratio": 0.0, "step_time": 1.0, "compile/num_programs": 0.0,
}  # fmt: skip
TABLE = {"prompt": ["1 + 1?"], "completion": ["2"], "reward": [1.0], "length": [2]}


class Recorder(Tracker):
    """Remembers its calls, and raises an error at each of them where it is told to."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.calls: list[tuple[str, int]] = []

    def _called(self, name: str, step: int) -> None:
        self.calls.append((name, step))
        if self.error is not None:
            raise self.error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._called("log", step)

    def completions(self, step: int, table: Mapping[str, Any]) -> None:
        self._called("completions", step)

    def finish(self) -> None:
        self._called("finish", 0)


@pytest.fixture
def record(tmp_path: Path) -> Callable[..., RunRecord]:
    """Makes the record of a run in one folder, resumed after a step if that is given."""

    def make(*trackers: Tracker, step: int = 0, **settings: Any) -> RunRecord:
        cfg = GRPOConfig(output_dir=tmp_path / "run", **settings).resolved()
        return RunRecord(cfg, LAYOUT, trackers, step=step, continued=step > 0)

    return make


def recorded_steps(folder: Path) -> list[int]:
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


def unreachable(*arguments: Any) -> Tracker:
    raise UserError("Weights & Biases did not start (timed out): use --wandb offline.")


def test_a_tracker_that_raises_at_every_call_leaves_the_run_intact_and_is_named_once(
    record: Callable[..., RunRecord], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    faulty, healthy = Recorder(TimeoutError("no answer")), Recorder()
    with record(faulty, healthy) as run:
        run.evaluation(0, {"eval/greedy/pass@1": 0.25})
        for step in (1, 2):
            run.step(step, METRICS)
        run.completions({"step": [2], **TABLE}, {})
    calls = [("log", 0), ("log", 1), ("log", 2), ("completions", 2), ("finish", 0)]
    assert faulty.calls == healthy.calls == calls
    assert recorded_steps(tmp_path) == [0, 1, 2]
    assert (tmp_path / "run" / "completions" / "step_000002.parquet").is_file()
    said = [line for line in capsys.readouterr().out.splitlines() if "Recorder" in line]
    assert said == [
        "warning: tracker Recorder failed at step 0 (TimeoutError: no answer): the run goes on, "
        "and metrics.jsonl has what it misses."
    ]


def test_metrics_that_cannot_be_written_end_the_run_but_all_trackers_finish(
    record: Callable[..., RunRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    other = Recorder()
    monkeypatch.setattr(JsonlTracker, "log", full)
    with (
        pytest.raises(RunError, match=r"could not be written .* \(No space left"),
        record(other) as run,
    ):
        run.step(1, METRICS)
    assert other.calls == [("finish", 0)]


def test_a_tracker_that_cannot_be_opened_refuses_a_new_run(
    record: Callable[..., RunRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_trackers, "WandbTracker", unreachable)
    with pytest.raises(UserError, match="use --wandb offline"), record(wandb="online"):
        pass


def test_in_the_middle_of_a_run_it_is_a_warning(
    record: Callable[..., RunRecord], monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    with record() as run:
        run.step(1, METRICS)
    monkeypatch.setattr(run_trackers, "WandbTracker", unreachable)
    with record(step=1, wandb="online") as run:
        run.step(2, METRICS)
    assert "warning: Weights & Biases could not be opened (UserError: Weights" in (
        capsys.readouterr().out
    )
    run.evaluation(2, {"eval/greedy/pass@1": 0.5})  # after the end, all are opened again
    assert "warning: Weights & Biases could not be opened" in capsys.readouterr().out
    assert recorded_steps(tmp_path) == [1, 2, 2]


def test_event_files_of_a_resumed_run_have_every_step_once_and_an_earlier_run_keeps_its_own(
    record: Callable[..., RunRecord], tmp_path: Path
) -> None:
    with record(report_to=("tensorboard",)) as run:
        for step in (1, 2, 3):
            run.step(step, METRICS)
    with record(report_to=("tensorboard",), step=2) as run:
        run.step(3, METRICS | {"reward": 0.75})
        run.completions({"step": [3], **TABLE}, {})
    run.evaluation(3, {"eval/greedy/pass@1": 0.5})
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    rewards = [(event.step, event.value) for event in events.Scalars("reward")]
    assert rewards == [(1, 0.5), (2, 0.5), (3, 0.75)]
    assert [event.step for event in events.Scalars("eval/greedy/pass@1")] == [3]
    assert [event.step for event in events.Tensors("completions/text_summary")] == [3]
    with record(report_to=("tensorboard",)) as run:  # a new run
        run.step(1, METRICS)
    kept = EventAccumulator(str(tmp_path / "run" / "previous-1" / "tensorboard")).Reload()
    new = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert (len(kept.Scalars("reward")), len(new.Scalars("reward"))) == (3, 1)


def test_several_trackers_get_all(
    record: Callable[..., RunRecord], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wandb, own = Recorder(), Recorder()
    monkeypatch.setattr(run_trackers, "WandbTracker", lambda *arguments: wandb)
    with record(own, report_to=("tensorboard", "wandb")) as run:
        run.step(1, METRICS)
    assert wandb.calls == own.calls == [("log", 1), ("finish", 0)]
    assert EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload().Scalars("reward")


class Faulty(Tracker):
    """Raises an error at every call while it is broken."""

    def __init__(self, error: BaseException) -> None:
        self.error: BaseException | None = error
        self.got: list[Any] = []

    def _take(self, what: Any) -> None:
        if self.error is not None:
            raise self.error
        self.got.append(what)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._take((step, metrics))

    def completions(self, step: int, table: Mapping[str, Any]) -> None:
        self._take((step, table))

    def finish(self) -> None:
        self._take("finish")


def test_one_that_fails_at_every_call_is_named_once() -> None:
    warnings: list[str] = []
    guarded = GuardedTracker(Faulty(ConnectionError("no route to host\nat all")), warnings.append)
    guarded.log(3, {})
    guarded.completions(3, {})
    guarded.log(4, {})
    guarded.finish()
    assert warnings == [
        "tracker Faulty failed at step 3 (ConnectionError: no route to host): the run goes on, and "
        "metrics.jsonl has what it misses."
    ]


def test_one_that_fails_at_the_end_only_is_named_too() -> None:
    warnings: list[str] = []
    GuardedTracker(Faulty(OSError("full")), warnings.append).finish()
    assert warnings[0].startswith("tracker Faulty failed when the run ended (OSError: full)")


def test_one_that_works_again_gets_the_next_step() -> None:
    tracker, warnings = Faulty(OSError("full")), list[str]()
    guarded = GuardedTracker(tracker, warnings.append)
    guarded.log(1, {"reward": 0.1})
    tracker.error = None
    guarded.log(2, {"reward": 0.2})
    guarded.finish()
    assert tracker.got == [(2, {"reward": 0.2}), "finish"]
    assert len(warnings) == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
def test_what_ends_a_process_is_no_failure_of_a_tracker(error: BaseException) -> None:
    warnings: list[str] = []
    guarded = GuardedTracker(Faulty(error), warnings.append)
    for call in (lambda: guarded.log(1, {}), lambda: guarded.completions(1, {}), guarded.finish):
        with pytest.raises(type(error)):
            call()
    assert warnings == []


def test_a_tracker_need_not_show_completions() -> None:
    class Plain(Tracker):
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            pass

        def finish(self) -> None:
            pass

    warnings: list[str] = []
    GuardedTracker(Plain(), warnings.append).completions(1, {"prompt": []})
    assert warnings == []
