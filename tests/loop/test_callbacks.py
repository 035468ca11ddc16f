"""Callbacks: when they are called, what they can do to a run, and how their errors end it."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from grpo_eqx import (
    Callback,
    EarlyStop,
    Event,
    GRPOConfig,
    GRPOTrainer,
    Response,
    RunView,
    UserError,
)
from grpo_eqx.common.errors import CallbackError
from grpo_eqx.data.tokenizer import ChatTokenizer
from grpo_eqx.loop.callback_calls import CallbackCalls
from grpo_eqx.models.interface import CausalLM
from grpo_eqx.tracking import Tracker

PROBLEMS = Path(__file__).parents[1] / "problems.jsonl"


class Logged(Tracker):
    """Everything that a tracker gets."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.rows.append((step, dict(metrics)))

    def finish(self) -> None: ...


class Told(Callback):
    """Writes down what it is told, and responds to events by their names."""

    def __init__(self, **responses: Response) -> None:
        self.events: list[tuple[str, int]] = []
        self.responses = responses

    def note(self, name: str, event: Event) -> Response | None:
        self.events.append((name, event.step))
        return self.responses.get(name)

    def on_train_begin(self, event: Event) -> Response | None:
        return self.note("begin", event)

    def on_step_end(self, event: Event) -> Response | None:
        assert "reward" in event.metrics
        assert [row["step"] for row in event.history] == list(range(1, event.step))
        return self.note("step", event)

    def on_evaluate(self, event: Event) -> Response | None:
        assert "eval/greedy/pass@1" in event.metrics
        assert event.run.cfg.eval_steps == 2
        assert set(event.run.evaluation_names) <= set(event.metrics)
        return self.note("evaluate", event)

    def on_save(self, event: Event) -> None:
        assert event.checkpoint is not None
        assert (event.checkpoint / "state").is_dir()
        tables = event.checkpoint.parents[1] / "completions"
        assert (tables / f"step_{event.step:06d}.parquet").exists()
        self.note("save", event)

    def on_train_end(self, event: Event) -> None:
        self.note("end", event)


def distinct_words(*, completions: list[str], **columns: Any) -> list[float]:
    """A reward that an untrained model does not always get alike."""
    return [float(len(set(text.split()))) for text in completions]


@pytest.fixture
def trainer(small_model: Path, tmp_path: Path) -> Callable[..., GRPOTrainer]:
    """Makes a trainer of a run of four steps, evaluated after two."""

    def make(*callbacks: Callback, folder: str = "run", **changes: Any) -> GRPOTrainer:
        settings = {
            "model": str(small_model), "data": str(PROBLEMS), "steps": 4, "prompts_per_step": 8,
            "num_generations": 2, "max_completion_length": 4, "eval_problems": 8, "save_steps": 2,
            "eval_steps": 2, "learning_rate": 1e-3, "lr_scheduler_type": "constant",
            "output_dir": str(tmp_path / folder), **changes,
        }  # fmt: skip
        return GRPOTrainer(
            GRPOConfig(**settings), reward_funcs=[distinct_words], callbacks=callbacks,
            trackers=[tracker],
        )  # fmt: skip

    tracker = Logged()
    make.tracker = tracker  # type: ignore[attr-defined]
    return make


def test_they_are_told_of_everything_in_its_order(trainer: Callable[..., GRPOTrainer]) -> None:
    told = Told(step=Response(metrics={"mine": 2.0}), evaluate=Response(metrics={"eval/mine": 3.0}))
    result = trainer(told, eval_on_start=True).fit()
    assert told.events == [
        ("begin", 0), ("evaluate", 0), ("step", 1), ("step", 2), ("evaluate", 2), ("save", 2),
        ("step", 3), ("step", 4), ("evaluate", 4), ("save", 4), ("end", 4),
    ]  # fmt: skip
    assert result.stopped is None
    rows = trainer.tracker.rows  # type: ignore[attr-defined]
    assert [(step, "mine" in row, "eval/mine" in row) for step, row in rows] == [
        (0, False, True), (1, True, False), (2, True, False), (2, False, True), (3, True, False),
        (4, True, False), (4, False, True),
    ]  # fmt: skip
    assert [row.get("mine") for row in result.history] == [2.0] * 4
    assert [row["eval/mine"] for row in result.evaluations] == [3.0] * 3


class StopAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, event: Event) -> Response | None:
        return Response(stop="enough") if event.step == self.step else None


@pytest.mark.slow
def test_one_can_end_a_run_with_its_evaluation_its_checkpoint_and_its_model(
    trainer: Callable[..., GRPOTrainer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = Told()
    result = trainer(StopAt(3), told, save_steps=None).fit()
    assert result.stopped == "StopAt: enough"
    assert told.events[-4:] == [("step", 3), ("evaluate", 3), ("save", 3), ("end", 3)]
    assert (tmp_path / "run" / "model" / "config.json").exists()
    assert "stopped after step 3 of 4: StopAt: enough" in capsys.readouterr().out
    stopped = json.loads((tmp_path / "run" / "stopped.json").read_text())
    assert stopped == {"step": 3, "reason": "StopAt: enough"}
    # Without the callback, the run goes on from there, and was not stopped.
    again = trainer().fit()
    assert "a callback has ended this run: it goes on unless" in capsys.readouterr().err
    assert [row["step"] for row in again.history] == [1, 2, 3, 4]
    assert again.stopped is None
    assert not (tmp_path / "run" / "stopped.json").exists()


@pytest.mark.slow
def test_a_resumed_run_is_stopped_at_the_same_step(
    trainer: Callable[..., GRPOTrainer], tmp_path: Path
) -> None:
    """By the length of completions, which only falls; in one piece, in two, and once more."""

    class Falling(Callback):
        def on_step_end(self, event: Event) -> Response:
            return Response(metrics={"falling": -float(event.step)})

    class InterruptionError(Exception):
        pass

    def callbacks() -> tuple[Callback, ...]:
        return Falling(), EarlyStop("falling", 2)

    settings = {"steps": 9, "save_steps": 1, "eval_steps": None}
    whole = trainer(*callbacks(), folder="whole", **settings).fit()
    assert [row["step"] for row in whole.history] == [1, 2, 3]
    first = trainer(*callbacks(), **settings)
    collect = first.rollouts.next

    def interrupted(*arguments: Any) -> Any:
        if first.state.step == 2:
            raise InterruptionError
        return collect(*arguments)

    first.rollouts.next = interrupted  # type: ignore[method-assign]
    with pytest.raises(InterruptionError):
        first.fit()
    for _ in range(2):  # what is stopped stays so
        parts = trainer(*callbacks(), **settings).fit()
        assert [row["step"] for row in parts.history] == [1, 2, 3]
        assert (
            parts.stopped
            == whole.stopped
            == ("EarlyStop: falling was -1, and no better 2 times since")
        )
    assert (tmp_path / "run" / "model").is_dir()


class Broken(Callback):
    def on_step_end(self, event: Event) -> None:
        raise ZeroDivisionError("a bug")


@pytest.mark.slow
def test_an_error_ends_the_run_by_the_callbacks_name(
    trainer: Callable[..., GRPOTrainer], tmp_path: Path
) -> None:
    with pytest.raises(
        CallbackError, match="callback Broken raised ZeroDivisionError in on_step_end after step 1"
    ) as caught:
        trainer(Broken(), save_steps=1).fit()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert not (tmp_path / "run" / "model").exists()
    assert [row["step"] for row in trainer(save_steps=1).fit().history] == [1, 2, 3, 4]


def event(step: int = 1, **metrics: float) -> Event:
    """An event of no real run."""
    return event_of(step=step, metrics=metrics)


def event_of(num_callbacks: int = 1, **fields: Any) -> Event:
    run = RunView(
        cfg=GRPOConfig(), tokenizer=Mock(spec=ChatTokenizer), generate=Mock(), evaluate=Mock(),
        save_pretrained=Mock(), evaluation_names=["eval/greedy/pass@1"],
        num_callbacks=num_callbacks,
    )  # fmt: skip
    known = {"step": 1, "metrics": {}, "history": (), "evaluations": ()}
    return Event(run=run, model=Mock(spec=CausalLM), **{**known, **fields})


def told(callback: Callback, **metrics: float) -> Any:
    return CallbackCalls([callback])("on_step_end", event(**metrics))


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (Response(metrics={"reward": 1.0}), "Told logs 'reward', which the run logs already"),
        (Response(metrics={"step": 7.0}), "Told logs 'step', a name by which"),
        (
            Response(metrics={"eval/mine": 1.0}),
            "Told logs 'eval/mine', a name by which",
        ),
        *(
            (Response(metrics={name: 1.0}), "Told logs a metric with the name .*: give it a name")
            for name in ("a\x1b[2J", "a\nb", "\x9b", "\u202e", "\u200b", "\ud800", " ", "")
        ),
        ("stop", "on_step_end returned a str: return a grpo_eqx.Response"),
    ],
)
def test_responses_that_cannot_be_are_refused(response: Any, message: str) -> None:
    class Told(Callback):
        def on_step_end(self, event: Event) -> Any:
            return response

    with pytest.raises(UserError, match=message):
        told(Told(), reward=0.5)


@pytest.mark.parametrize("name", [3, None, b"x", ("a", "b"), Enum("Kind", ["A"]).A], ids=repr)
def test_a_name_that_is_no_text_is_called_so(name: object) -> None:
    class Told(Callback):
        def on_step_end(self, event: Event) -> Response:
            response = Response()
            object.__setattr__(response, "metrics", {name: 1.0})  # whose types tests check
            return response

    with pytest.raises(UserError, match=r"Told logs a metric .*: give it a name that is a text"):
        told(Told())


def test_nothing_is_logged_where_there_is_no_step() -> None:
    class Early(Callback):
        def on_train_begin(self, event: Event) -> Response:
            return Response(metrics={"x": 1.0})

    with pytest.raises(UserError, match=r"on_train_begin returned metrics, and there is no step"):
        CallbackCalls([Early()])("on_train_begin", event())


def test_events_do_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        event().step = 3  # type: ignore[misc]


def stops_at(stop: EarlyStop, values: Sequence[float]) -> int | None:
    """The step whose value ends the run, of the values of all steps."""
    rows = [{"step": float(i), "m": value} for i, value in enumerate(values, start=1)]
    for i, row in enumerate(rows, start=1):
        now = event_of(step=i, metrics={"m": row["m"]}, history=tuple(rows[: i - 1]))
        if stop.on_step_end(now) is not None:
            return i
    return None


@pytest.mark.parametrize(
    ("arguments", "values", "step"),
    [
        ({}, [1, 2, 3, 4], None),
        ({}, [1, 2, 2, 2], 4),
        ({}, [3, 2, 4, 3, 4], 5),
        ({"greater_is_better": False}, [1, 2, 3], 3),
        ({"greater_is_better": False}, [3, 2, 1], None),
        ({"min_improvement": 0.5}, [1, 1.4, 1.5], 3),
        ({}, [float("nan"), float("nan"), 1], 2),
        ({}, [1, float("nan"), float("nan")], 3),
    ],
)
def test_early_stop_waits_for_something_better(
    arguments: dict[str, Any], values: list[float], step: int | None
) -> None:
    assert stops_at(EarlyStop("m", 2, **arguments), [float(x) for x in values]) == step


def test_early_stop_may_watch_what_another_callback_adds_to_evaluations() -> None:
    stop = EarlyStop("eval/judge", 1)

    def now(name: str, **fields: Any) -> Any:
        return getattr(stop, name)(event_of(num_callbacks=2, **fields))

    assert now("on_train_begin") is None
    assert now("on_step_end", metrics={"reward": 0.5}) is None
    assert now("on_evaluate", metrics={"eval/judge": 0.5}) is None
    before = {"history": ({"reward": 0.5},), "evaluations": ({"eval/judge": 0.5},)}
    assert "eval/judge was 0.5" in now("on_evaluate", metrics={"eval/judge": 0.4}, **before).stop
    with pytest.raises(UserError, match="'eval/judge', which neither steps nor evaluations log"):
        now("on_evaluate", metrics={"eval/greedy/pass@1": 0.5}, history=({"reward": 0.5},))


def test_early_stop_refuses_a_metric_that_there_is_not() -> None:
    with pytest.raises(UserError, match=r"'rewrd', which steps do not log \(did you mean reward\?"):
        told(EarlyStop("rewrd", 2), reward=0.5)
    with pytest.raises(UserError, match="'eval/pass@1', which no evaluation of this run logs"):
        CallbackCalls([EarlyStop("eval/pass@1", 2)])("on_train_begin", event())
    with pytest.raises(UserError, match="patience is 0"):
        EarlyStop("reward", 0)
