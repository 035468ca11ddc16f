"""A run that is interrupted and started again is the run that was not interrupted."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pyarrow.parquet as pq
import pytest

from grpo_eqx import GRPOConfig, GRPOTrainer, UserError
from grpo_eqx.checkpoint.same_run import RunFacts
from grpo_eqx.checkpoint.saved import complete_steps
from grpo_eqx.common.compiler import Compiler
from grpo_eqx.loss_backends import ChunkedLoss, DenseLoss
from grpo_eqx.rewards import RewardFunc, gsm8k
from grpo_eqx.settings.run_names import MAY_CHANGE
from grpo_eqx.sharding import ExplicitMesh, Mesh
from grpo_eqx.training.state import TrainState

pytestmark = pytest.mark.slow

PROBLEMS = Path(__file__).parents[1] / "problems.jsonl"
STEPS = 6
OF_THE_MACHINE = ("time/", "throughput/", "memory/", "perf/", "compile/", "step_time")


class InterruptionError(Exception):
    """Stands for whatever ends a process between two steps."""


def distinct_words(*, completions: list[str], **columns: Any) -> list[float]:
    """A reward that an untrained model does not always get alike."""
    return [float(len(set(text.split()))) for text in completions]


@pytest.fixture
def settings(small_model: Path) -> dict[str, Any]:
    return {
        "model": str(small_model), "data": str(PROBLEMS), "steps": STEPS, "prompts_per_step": 8,
        "num_generations": 4, "max_completion_length": 6, "eval_problems": 8, "save_steps": 1,
        "learning_rate": 1e-3, "log_completions_steps": 1,
    }  # fmt: skip


@pytest.fixture
def train(settings: dict[str, Any]) -> Callable[..., GRPOTrainer]:
    """Runs the settings in a folder, with changes, until after a step or to the end."""

    def run(
        folder: Path, until: int | None = None, mesh: Mesh | None = None, **changes: Any
    ) -> GRPOTrainer:
        cfg = GRPOConfig(**{**settings, **changes}, output_dir=folder)
        trainer = GRPOTrainer(cfg, reward_funcs=[distinct_words], mesh=mesh)
        collect = trainer.rollouts.next

        def interrupted(*arguments: Any) -> Any:
            if trainer.state.step == until:
                raise InterruptionError
            return collect(*arguments)

        trainer.rollouts.next = interrupted  # type: ignore[method-assign]
        if until is None:
            trainer.fit()
        else:
            with pytest.raises(InterruptionError):
                trainer.fit()
        return trainer

    return run


def same(one: TrainState, other: TrainState) -> bool:
    """Whether two states are equal in every bit, compared on the host: each comparison on eight
    devices is a program of its own, and XLA's CPUs cannot have that many in flight.
    """
    return bool(eqx.tree_equal(*jax.device_get((one, other))))


def records(folder: Path) -> list[dict[str, float]]:
    """The metrics of every step, times aside."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: x for name, x in row.items() if not name.startswith(OF_THE_MACHINE)} for row in rows
    ]


def tables(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The completions of every step."""
    paths = (folder / "completions").iterdir()
    return {path.name: pq.read_table(path).to_pylist() for path in paths}


@pytest.mark.grid
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_iterations": 2, "beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2},
        {"dynamic_sampling": True, "steps_per_generation": 1, "epsilon_high": 0.28},
    ],
    ids=["plain", "reference", "dynamic sampling"],
)
def test_it_is_the_same_in_every_bit(
    train: Callable[..., GRPOTrainer], tmp_path: Path, changes: dict[str, Any]
) -> None:
    whole = train(tmp_path / "whole", **changes)
    for until in (2, 5):
        train(tmp_path / "parts", until, **changes)
    parts = train(tmp_path / "parts", **changes)
    assert same(parts.state, whole.state)
    assert records(tmp_path / "parts") == records(tmp_path / "whole")
    assert [row["step"] for row in records(tmp_path / "parts")] == [1, 2, 3, 4, 5, 6]
    assert tables(tmp_path / "parts") == tables(tmp_path / "whole")
    assert not (tmp_path / "parts" / "previous-1").exists()


def test_it_goes_on_from_the_last_checkpoint_and_forgets_what_came_after(
    train: Callable[..., GRPOTrainer], tmp_path: Path
) -> None:
    """As after a kill: there are records of steps 3 and 4, and half a line, but no checkpoint."""
    train(tmp_path / "run", until=4, save_steps=2)
    folder = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["step_2", "step_4"]
    (folder / "step_4").rename(tmp_path / "lost")
    with (tmp_path / "run" / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 5, "rew')
    train(tmp_path / "run", save_steps=2)
    train(tmp_path / "whole")
    assert records(tmp_path / "run") == records(tmp_path / "whole")


def test_it_continues_on_another_mesh(
    train: Callable[..., GRPOTrainer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path / "run", until=3)
    train(tmp_path / "run", mesh=ExplicitMesh(dp=2, fsdp=2, tp=2), micro_batch_size_per_device=2)
    assert "changed since then: micro_batch_size_per_device: None -> 2" in capsys.readouterr().err
    train(tmp_path / "whole")
    assert [t["completion"] for x in tables(tmp_path / "run").values() for t in x] == [
        t["completion"] for x in tables(tmp_path / "whole").values() for t in x
    ]
    for found, expected in zip(records(tmp_path / "run"), records(tmp_path / "whole"), strict=True):
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


def test_objects_of_another_class_are_said(
    settings: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for steps, backend in ((1, DenseLoss()), (2, ChunkedLoss()), (3, ChunkedLoss()), (4, None)):
        cfg = GRPOConfig(**{**settings, "steps": steps, "save_steps": 1}, output_dir=tmp_path)
        GRPOTrainer(cfg, reward_funcs=[distinct_words], loss_backend=backend).fit()
        error = capsys.readouterr().err
        assert ("loss_backend: DenseLoss -> ChunkedLoss" in error) == (steps == 2)
        assert ("loss_backend: ChunkedLoss -> by its setting" in error) == (steps == 4)
        assert ("objects passed to GRPOTrainer changed" in error) == (steps in (2, 4))


def test_a_finished_run_is_finished_and_more_steps_continue_it(
    train: Callable[..., GRPOTrainer], tmp_path: Path
) -> None:
    """So that a scheduler may repeat a command, whenever it was interrupted."""
    settings = {"steps": 2, "lr_scheduler_type": "constant"}
    first = train(tmp_path / "run", **settings)
    again = train(tmp_path / "run", **settings)
    assert same(again.state, first.state)
    assert [row["step"] for row in records(tmp_path / "run")] == [1, 2]
    assert not (tmp_path / "run" / "previous-1").exists()
    train(tmp_path / "run", **{**settings, "steps": 4})
    train(tmp_path / "whole", **{**settings, "steps": 4})
    assert records(tmp_path / "run") == records(tmp_path / "whole")


def test_a_finished_run_is_refused_to_another_as_an_unfinished_one_is(
    train: Callable[..., GRPOTrainer], tmp_path: Path
) -> None:
    """With both values, and how to train on from its model; nothing in the folder changes."""
    run = tmp_path / "run"
    train(run, steps=2)

    def files() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in run.rglob("[!.]*") if path.is_file()}

    before = files()
    with pytest.raises(UserError, match=r"of another run \(seed: 0 -> 1\)") as error:
        train(run, steps=2, seed=1)
    advice = f"a new run with --model {run}/model and another --output-dir; to start anew in its"
    assert advice in str(error.value)
    with pytest.raises(UserError, match=r"step_2 is a checkpoint after step 2, and steps is 1"):
        train(run, steps=1)
    assert files() == before
    train(run, steps=1, seed=1, resume="never")
    assert (run / "previous-1" / "checkpoints" / "step_2").is_dir()


def test_nothing_is_compiled_beforehand_for_a_run_that_is_refused_or_finished(
    train: Callable[..., GRPOTrainer],
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    train(tmp_path / "done", steps=1)
    train(tmp_path / "part", until=1)
    begun = list[object]()
    monkeypatch.setattr(Compiler, "start", lambda self, lowerings: begun.append(lowerings))

    def compiles(**changes: Any) -> bool:
        begun.clear()
        GRPOTrainer(GRPOConfig(**{**settings, **changes}), reward_funcs=[distinct_words])
        return bool(begun)

    assert not compiles(output_dir=tmp_path / "done", steps=1)
    assert not compiles(output_dir=tmp_path / "done", steps=1, learning_rate=2e-3)
    assert not compiles(output_dir=tmp_path / "part", beta=0.1)
    assert compiles(output_dir=tmp_path / "part")
    assert compiles(output_dir=tmp_path / "done", steps=2)
    assert compiles(output_dir=tmp_path / "done", steps=1, beta=0.1, resume="never")
    assert compiles(output_dir=tmp_path / "new")
    shutil.rmtree(tmp_path / "part" / "checkpoints" / "step_1" / "facts")
    assert compiles(output_dir=tmp_path / "part")  # whatever `fit` finds


def test_a_finished_run_without_checkpoints_does_not_start_anew(
    train: Callable[..., GRPOTrainer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that was interrupted before its first checkpoint does, and says so before."""
    train(tmp_path / "run", steps=2)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with pytest.raises(UserError, match="is finished, after 2 steps, and none of its checkpoints"):
        train(tmp_path / "run", steps=2)
    shutil.rmtree(tmp_path / "run" / "model")
    capsys.readouterr()
    train(tmp_path / "run", steps=1)
    assert "recorded 2 steps and has no checkpoint: it starts again" in capsys.readouterr().err
    assert (tmp_path / "run" / "previous-1" / "metrics.jsonl").exists()


def test_never_starts_anew_and_a_path_continues_elsewhere(
    train: Callable[..., GRPOTrainer], tmp_path: Path
) -> None:
    train(tmp_path / "run", until=3)
    train(tmp_path / "copy", resume=str(tmp_path / "run"))
    assert [row["step"] for row in records(tmp_path / "copy")] == [4, 5, 6]
    train(tmp_path / "older", resume=str(tmp_path / "run" / "checkpoints" / "step_2"))
    assert [row["step"] for row in records(tmp_path / "older")] == [3, 4, 5, 6]
    train(tmp_path / "run", resume="never")
    assert [row["step"] for row in records(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]
    assert (tmp_path / "run" / "previous-1" / "checkpoints" / "step_3").is_dir()
    checkpoints = tmp_path / "older" / "checkpoints"
    train(tmp_path / "by-folder", resume=str(checkpoints))
    assert complete_steps(tmp_path / "by-folder" / "checkpoints") == []
    for path, message in {
        tmp_path / "nowhere": "does not exist: use auto, never, a run folder or a checkpoint",
        tmp_path: "has no checkpoints: use auto, never, ",
        checkpoints / "step_1": "does not exist: beside it are step_6, step_5",
    }.items():
        with pytest.raises(UserError, match=message):
            train(tmp_path / "new", resume=str(path))


def test_an_earlier_step_can_be_resumed_and_the_same_command_continues_from_there(
    train: Callable[..., GRPOTrainer], tmp_path: Path
) -> None:
    train(tmp_path / "run", until=4)
    checkpoints = tmp_path / "run" / "checkpoints"
    train(tmp_path / "run", until=5, resume=str(checkpoints / "step_3"))
    assert complete_steps(checkpoints) == [5, 4]
    assert (tmp_path / "run" / "previous-1" / "checkpoints" / "step_4").is_dir()
    train(tmp_path / "run", resume=str(checkpoints / "step_3"))
    assert not (tmp_path / "run" / "previous-2").exists()
    assert [row["step"] for row in records(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]


def test_it_is_one_run_at_weights_and_biases(
    train: Callable[..., GRPOTrainer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_MODE")
    train(tmp_path / "run", until=2, wandb="offline")
    train(tmp_path / "run", until=3, wandb="offline")
    folders = list((tmp_path / "run" / "wandb").glob("offline-run-*"))
    assert len(folders) == 2
    assert len({folder.name.rpartition("-")[2] for folder in folders}) == 1


def test_another_run_is_refused_by_the_names_of_its_settings(
    train: Callable[..., GRPOTrainer], tmp_path: Path
) -> None:
    train(tmp_path / "run", until=1)
    with pytest.raises(UserError, match=r"of another run \(num_generations: 4 -> 2; seed: 0 -> 1"):
        train(tmp_path / "run", seed=1, num_generations=2)
    others = tmp_path / "others.jsonl"
    others.write_text("".join(reversed(PROBLEMS.read_text().splitlines(keepends=True))))
    with pytest.raises(UserError, match=r"of another run \(the training problems are others\)"):
        train(tmp_path / "run", data=str(others))


def test_another_tokenizer_is_refused(
    train: Callable[..., GRPOTrainer], small_model: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(small_model, tmp_path / "model")
    train(tmp_path / "run", until=1, model=str(model))
    template = model / "chat_template.jinja"
    template.write_text("Answer briefly. " + template.read_text())
    with pytest.raises(UserError, match=r"of another run \(the tokenizer is another"):
        train(tmp_path / "run", model=str(model))


def test_other_versions_of_packages_are_said() -> None:
    now = RunFacts.of(GRPOConfig().resolved(), {}, {}, {})
    before = dataclasses.replace(now, versions={**now.versions, "jax": "0.0.1"})
    assert now.changes_since(now, Path("step_1")) == []
    assert now.changes_since(before, Path("step_1")) == [f"jax: 0.0.1 -> {jax.__version__}"]


def test_another_reward_function_is_refused_and_its_new_code_said() -> None:
    def facts(**rewards: RewardFunc) -> RunFacts:
        return RunFacts.of(GRPOConfig().resolved(), {}, {}, rewards)

    saved = facts(distinct_words=distinct_words)
    assert facts(distinct_words=distinct_words) == saved
    with pytest.raises(UserError, match=r"reward_funcs: \['distinct_words'\] -> \['correct'\]"):
        facts(correct=gsm8k.correct).changes_since(saved, Path("step_1"))
    changed = facts(distinct_words=gsm8k.correct)
    said = ["the file of distinct_words has changed"]
    assert changed.changes_since(saved, Path("step_1")) == said
    assert changed.changed_rewards(saved) == said
    assert changed.refused(saved) == []


class Quiz:
    """Stands for a class of environments."""


def test_other_tools_are_refused_and_their_new_code_said() -> None:
    def facts(**tools: Callable[..., Any]) -> RunFacts:
        problems = {"the training problems": str(tools)}  # which describe the tools
        return RunFacts.of(GRPOConfig().resolved(), problems, {}, {}, tools=tools)

    saved = facts(search=spoil, Quiz=Quiz)
    assert facts(search=spoil, Quiz=Quiz) == saved
    with pytest.raises(UserError, match=r"\(tools: \['search', 'Quiz'\] -> \['look', 'Quiz'\]\)"):
        facts(look=spoil, Quiz=Quiz).changes_since(saved, Path("step_1"))
    changed = facts(search=gsm8k.correct, Quiz=GRPOConfig)
    changed = dataclasses.replace(changed, fingerprints=saved.fingerprints)
    said = ["the files of search and Quiz have changed"]
    assert changed.changes_since(saved, Path("step_1")) == said


def spoil(checkpoint: Path) -> None:
    """Cuts the files of a checkpoint's arrays in half."""
    for file in checkpoint.glob("state/**/d/*"):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def test_a_spoilt_checkpoint_is_named_and_the_one_before_it_used(
    train: Callable[..., GRPOTrainer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path / "run", until=4)
    spoil(tmp_path / "run" / "checkpoints" / "step_4")
    train(tmp_path / "run", until=5)
    said = capsys.readouterr().err
    assert "warning: cannot read the checkpoint" in said
    assert "step_3, after step 3 of 6" in said
    for path in (tmp_path / "run" / "checkpoints").iterdir():
        spoil(path)
    with pytest.raises(UserError, match=r"none of the 2 checkpoints .* to never to start anew"):
        train(tmp_path / "run")


def test_the_best_checkpoint_by_a_metric_is_kept(
    train: Callable[..., GRPOTrainer], tmp_path: Path
) -> None:
    settings = {"save_total_limit": 1, "metric_for_best_model": "grad_norm"}
    train(tmp_path / "run", greater_is_better=False, **settings)
    norms = {row["step"]: row["grad_norm"] for row in records(tmp_path / "run")}
    best = min(norms, key=lambda step: norms[step])
    assert set(complete_steps(tmp_path / "run" / "checkpoints")) == {6, best}
    with pytest.raises(UserError, match="'accuracy', which training steps do not log"):
        train(tmp_path / "other", **{**settings, "metric_for_best_model": "accuracy"})


def test_what_may_change_are_settings() -> None:
    assert {field.name for field in dataclasses.fields(GRPOConfig)} >= MAY_CHANGE


@pytest.mark.grid
@pytest.mark.parametrize("damaged", [False, True])
def test_a_refusal_leaves_the_trainer_and_the_folder_as_they_were(
    settings: dict[str, Any], train: Callable[..., GRPOTrainer], tmp_path: Path, damaged: bool
) -> None:
    folder = tmp_path / "run"
    train(folder, until=2)
    changes = {} if damaged else {"learning_rate": 1e-4}
    trainer = GRPOTrainer(
        GRPOConfig(**{**settings, **changes}, output_dir=folder), reward_funcs=[distinct_words]
    )
    for path in (folder / "checkpoints").iterdir() if damaged else ():
        spoil(path)
    files, state = sorted(folder.rglob("*")), jax.device_get(trainer.state)
    with pytest.raises(UserError, match="can be read" if damaged else "of another run"):
        trainer.fit()
    assert sorted(folder.rglob("*")) == files
    assert same(trainer.state, state)
    assert len(trainer.generate(["1 + 1?"])) == 1
    trainer.fit(resume_from_checkpoint=False)
    assert trainer.state.step == STEPS


def test_a_foreign_folder_is_refused_before_a_checkpoint_is_read(
    settings: dict[str, Any], train: Callable[..., GRPOTrainer], tmp_path: Path
) -> None:
    train(tmp_path / "run", until=2)
    (tmp_path / "mine" / "model").mkdir(parents=True)
    trainer = GRPOTrainer(
        GRPOConfig(**settings, output_dir=tmp_path / "mine"), reward_funcs=[distinct_words]
    )
    with pytest.raises(UserError, match="already contains 'model', but is not a run folder"):
        trainer.fit(tmp_path / "run")
    assert trainer.state.step == 0
