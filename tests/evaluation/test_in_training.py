"""Evaluations during training: when they are made, and that they change nothing."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import pytest

from grpo_eqx import GRPOConfig, GRPOTrainer, UserError
from grpo_eqx.checkpoint.preemption import Preempted, StopRequest
from grpo_eqx.checkpoint.saved import complete_steps
from grpo_eqx.evaluation import in_training
from grpo_eqx.evaluation.evaluator import Draws, Evaluator
from grpo_eqx.sharding import RolloutLayout, RolloutSharding
from grpo_eqx.tracking.metrics import OF_THE_MACHINE
from grpo_eqx.tracking.stages import Stages

PROBLEMS = Path(__file__).parents[1] / "problems.jsonl"
NAME = "eval/temperature_1/words"


class InterruptionError(Exception):
    """Stands for whatever ends a process between two steps."""


def words(*, completions: list[str], **columns: Any) -> list[float]:
    """Something that an untrained model is not always equally good at."""
    return [float(len(set(text.split()))) for text in completions]


@pytest.fixture
def make(small_model: Path, tmp_path: Path) -> Callable[..., GRPOTrainer]:
    """Makes trainers of a run of five steps, by folder."""

    def trainer(folder: str, **changes: Any) -> GRPOTrainer:
        settings = {
            "model": str(small_model), "data": str(PROBLEMS), "steps": 5, "prompts_per_step": 8,
            "num_generations": 2, "max_completion_length": 6, "eval_problems": 8, "save_steps": 1,
            "eval_steps": 2, "eval_on_start": True, "num_generations_eval": 3,
            "learning_rate": 1e-2, "lr_scheduler_type": "constant", "log_completions_steps": 0,
            "output_dir": str(tmp_path / folder), **changes,
        }  # fmt: skip
        return GRPOTrainer(
            GRPOConfig(**settings), reward_funcs=[words], eval_metrics={"words": words}
        )

    return trainer


def rows(trainer: GRPOTrainer) -> list[dict[str, float]]:
    """The metrics of steps and evaluations, times aside."""
    assert trainer.cfg.output_dir is not None
    lines = (Path(trainer.cfg.output_dir) / "metrics.jsonl").read_text().splitlines()
    return [
        {name: x for name, x in json.loads(line).items() if not name.startswith(OF_THE_MACHINE)}
        for line in lines
    ]


def evaluations(trainer: GRPOTrainer) -> list[dict[str, float]]:
    return [row for row in rows(trainer) if "reward" not in row]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


def interrupt(trainer: GRPOTrainer, step: int) -> None:
    """Ends the run after a step, when the next has begun."""
    collect = trainer.rollouts.next

    def interrupted(*arguments: Any) -> Any:
        if trainer.state.step == step:
            raise InterruptionError
        return collect(*arguments)

    trainer.rollouts.next = interrupted  # type: ignore[method-assign]
    with pytest.raises(InterruptionError):
        trainer.fit()


@pytest.mark.slow
def test_they_are_made_when_they_are_due_and_change_nothing(
    make: Callable[..., GRPOTrainer],
) -> None:
    evaluated = make("evaluated")
    result = evaluated.fit()
    assert [row["step"] for row in rows(evaluated)] == [0, 1, 2, 2, 3, 4, 4, 5, 5]
    assert [row["step"] for row in result.evaluations] == [0, 2, 4, 5]
    assert all(row["time/eval_s"] > 0 for row in result.evaluations)
    assert {*evaluations(evaluated)[0]} == {"step", *evaluated.evaluation_names}
    assert len({row[NAME] for row in evaluations(evaluated)}) > 1  # it learned something
    # Those made by a call are the same to the last digit.
    found = {}
    for draws in ({}, {"temperature": 1.0, "num_samples": 3}):
        found |= evaluated.evaluate(**draws).metrics()
    assert {"step": 5, **found} == evaluations(evaluated)[-1]
    # And the steps are those of a run without evaluations.
    others = {"eval_steps": None, "eval_on_start": False, "num_generations_eval": None}
    plain = make("plain", **others)
    plain.fit()
    assert rows(plain) == [row for row in rows(evaluated) if "reward" in row]
    assert eqx.tree_equal(*jax.device_get((plain.state, evaluated.state)))


def test_they_say_how_far_they_are(
    make: Callable[..., GRPOTrainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As phases of a live display; elsewhere, in a line where they take long."""
    said = list[str]()

    def tracked(items: Any, description: str) -> Any:
        said.append(description)
        return items

    monkeypatch.setattr(in_training, "track_on_terminal", tracked)
    trainer = make("run", steps=2, eval_problems=8)
    lasting, stages = Stages.lasting, list[str]()

    def noted(self: Stages, text: str) -> Any:
        stages.append(text)
        return lasting(self, text)

    monkeypatch.setattr(Stages, "lasting", noted)
    trainer.fit()
    kinds = "greedy", "3 samples each"
    assert said == [
        f"evaluating {when} ({how})" for when in ("before step 1", "after step 2") for how in kinds
    ]
    assert [text for text in stages if text.startswith("evaluating")] == [
        "evaluating on 8 problems before training",
        "evaluating on 8 problems after step 2",
    ]


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize("step", [2, 3])
def test_a_resumed_run_is_the_unbroken_one(make: Callable[..., GRPOTrainer], step: int) -> None:
    whole = make("whole")
    whole.fit()
    interrupt(make("parts"), step)
    parts = make("parts")
    parts.fit()
    assert rows(parts) == rows(whole)
    assert eqx.tree_equal(*jax.device_get((parts.state, whole.state)))


@pytest.mark.slow
def test_a_request_to_stop_ends_an_evaluation_which_is_made_on_return(
    make: Callable[..., GRPOTrainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each batch, so that the checkpoint is written in time."""
    whole = make("whole", save_steps=None)
    whole.fit()
    parts = make("parts", save_steps=None)
    requests = list[StopRequest]()
    enter, batches, evaluated = StopRequest.__enter__, Evaluator.batches, list[int]()

    def entered(request: StopRequest) -> StopRequest:
        requests.append(request)
        return enter(request)

    def asked_in_the_second(
        self: Evaluator, model: Any, version: int, draws: Draws, **options: Any
    ) -> Any:
        for batch in batches(self, model, version, draws, **options):
            evaluated.append(draws.num_samples)
            requests[-1].received = len(evaluated) == 3  # greedy of the second evaluation
            yield batch

    monkeypatch.setattr(StopRequest, "__enter__", entered)
    with monkeypatch.context() as patched:
        patched.setattr(Evaluator, "batches", asked_in_the_second)
        with pytest.raises(Preempted):
            parts.fit()
    assert evaluated == [1, 3, 1]
    assert [row["step"] for row in rows(parts)] == [0, 1, 2]
    folder = Path(str(parts.cfg.output_dir)) / "checkpoints"
    assert complete_steps(folder) == [2]
    again = make("parts", save_steps=None)
    again.fit()
    assert rows(again) == rows(whole)


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize("greater_is_better", [True, False])
def test_the_best_evaluated_step_is_kept(
    make: Callable[..., GRPOTrainer], greater_is_better: bool
) -> None:
    trainer = make(
        "run", eval_steps=1, save_steps=None, save_total_limit=1, metric_for_best_model=NAME,
        greater_is_better=greater_is_better,
    )  # fmt: skip
    trainer.fit()
    values = {row["step"]: row[NAME] for row in evaluations(trainer) if row["step"] > 0}
    chosen = max if greater_is_better else min
    best = chosen(values, key=lambda step: values[step])
    folder = Path(str(trainer.cfg.output_dir)) / "checkpoints"
    assert set(complete_steps(folder)) == {5, int(best)}


def test_a_metric_that_no_evaluation_logs_is_refused(make: Callable[..., GRPOTrainer]) -> None:
    with pytest.raises(
        UserError,
        match=r"'eval/greedy/pass@2', which no evaluation logs \(did you mean eval/greedy/pass@1",
    ):
        make("run", metric_for_best_model="eval/greedy/pass@2")
    with pytest.raises(UserError, match="eval/x, a metric of evaluations, and eval_steps is not"):
        GRPOConfig(metric_for_best_model="eval/x")


def test_problems_without_answers_are_refused_before_the_first_step(
    make: Callable[..., GRPOTrainer], tmp_path: Path
) -> None:
    data = tmp_path / "data.jsonl"
    rows = [{"question": f"Name {i} colors.", "answer": "red"} for i in range(40)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match=r"eval_steps is 2: held-out problem 1 .* pass eval_func"):
        make("run", data=str(data))


class OverGroups(RolloutSharding):
    """Splits the completions of a prompt, of which a greedy evaluation has one."""

    def layout(self, mesh, num_prompts, num_generations, num_slots=None):
        return RolloutLayout(mesh, (), ("fsdp",), "over groups")


def test_evaluations_that_cannot_be_laid_out_are_refused_before_the_first_step(
    small_model: Path, tmp_path: Path
) -> None:
    settings = {
        "model": str(small_model), "data": str(PROBLEMS), "steps": 2, "prompts_per_step": 8,
        "num_generations": 2, "max_completion_length": 6, "eval_problems": 8,
        "output_dir": str(tmp_path / "run"), "mesh": "1,2,4",
    }  # fmt: skip
    GRPOTrainer(GRPOConfig(**settings), rollout_sharding=OverGroups(), reward_funcs=[words])
    with pytest.raises(
        UserError, match=r"8 problems at a time .*: OverGroups.*each prompt has one"
    ):
        GRPOTrainer(
            GRPOConfig(**settings, eval_steps=1),
            rollout_sharding=OverGroups(), reward_funcs=[words],
        )  # fmt: skip


@pytest.mark.parametrize(
    "settings",
    [{"eval_on_start": True}, {"num_generations_eval": 4}, {"eval_temperature": 0.5}],
)
def test_settings_without_evaluations_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="without eval_steps: it would do nothing"):
        GRPOConfig(**settings)


def test_the_temperature_is_that_of_training() -> None:
    cfg = GRPOConfig(eval_steps=1, num_generations_eval=4, temperature=0.7).resolved()
    assert cfg.eval_temperature == 0.7
