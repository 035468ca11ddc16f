"""Models from the hub at a branch, tag or commit, which the run records."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_eqx import GRPOConfig, GRPOTrainer, UserError
from grpo_eqx.checkpoint.export import export
from grpo_eqx.checkpoint.same_run import RunFacts
from grpo_eqx.checkpoint.saved import SavedStep
from grpo_eqx.models.hub import commit
from grpo_eqx.models.pretrained import find_config, model_folder

AddToHub = Callable[..., None]
OLD, NEW = "0" * 40, "a" * 40
PROBLEMS = Path(__file__).parents[1] / "problems.jsonl"


@pytest.fixture
def hub(add_to_hub: AddToHub, small_model: Path) -> AddToHub:
    """A cache with two commits of a model."""
    add_to_hub("model", "someone/small", small_model, OLD, "v1", "refs/pr/1")
    add_to_hub("model", "someone/small", small_model, NEW, "main")
    return add_to_hub


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("someone/small", NEW),
        ("someone/small@main", NEW),
        ("someone/small@v1", OLD),
        ("someone/small@refs/pr/1", OLD),
        (f"someone/small@{OLD}", OLD),
    ],
)
def test_the_revision_is_the_one_that_is_named(hub: AddToHub, name: str, expected: str) -> None:
    assert commit("model", name) is None
    assert model_folder(name).name == expected
    assert commit("model", name) == expected
    assert find_config(name) == find_config(str(model_folder("someone/small")))


def test_a_branch_that_moves_is_one_commit_for_a_process(
    hub: AddToHub, small_model: Path, tmp_path: Path
) -> None:
    assert model_folder("someone/small").name == NEW
    hub("model", "someone/small", small_model, "b" * 40, "main")
    assert model_folder("someone/small").name == NEW


def test_a_revision_that_does_not_exist_says_so(hub: AddToHub) -> None:
    with pytest.raises(UserError, match=r"'someone/small@v9' is neither a folder nor"):
        model_folder("someone/small@v9")


def test_only_hub_names_have_revisions(small_model: Path, tmp_path: Path) -> None:
    for name in (f"{small_model}@main", "tiny_qwen2@main"):
        with pytest.raises(UserError, match=r"only names on the Hugging Face hub have revisions"):
            model_folder(name)
        with pytest.raises(UserError, match=r"only names on the Hugging Face hub have revisions"):
            find_config(name)
    with pytest.raises(UserError, match="give a branch, tag or commit after the @"):
        model_folder("someone/small@")
    at = shutil.copytree(small_model, tmp_path / "model@main")
    assert model_folder(at) == at


def test_a_published_model_is_planned_at_any_revision_without_a_download() -> None:
    assert find_config("Qwen/Qwen2.5-3B@v1") == find_config("Qwen/Qwen2.5-3B")


def test_a_revision_is_part_of_the_run_folders_name() -> None:
    named = GRPOConfig(model="Qwen/Qwen2.5-3B@refs/pr/1", data="openai/gsm8k@v1").resolved()
    assert named.output_dir == "runs/Qwen2.5-3B@refs-pr-1-gsm8k@v1-seed0"


@pytest.mark.slow
def test_a_run_records_the_commit_and_says_when_it_has_moved(
    hub: AddToHub, tmp_path: Path, small_model: Path, monkeypatch, capsys
) -> None:
    def train(steps: int) -> None:
        cfg = GRPOConfig(
            model="someone/small", data=str(PROBLEMS), steps=steps, prompts_per_step=8,
            num_generations=4, max_completion_length=4, eval_problems=8, save_steps=1,
            lr_scheduler_type="constant", output_dir=tmp_path / "run",
        )  # fmt: skip
        GRPOTrainer(cfg).fit()

    train(steps=1)
    assert json.loads((tmp_path / "run" / "hub_commits.json").read_text()) == {"model": NEW}
    saved = SavedStep(tmp_path / "run" / "checkpoints", 1)
    assert RunFacts.saved(saved).commits == {"model": NEW}
    monkeypatch.setattr("grpo_eqx.models.hub._snapshots", {})
    hub("model", "someone/small", small_model, "b" * 40, "main")
    train(steps=2)
    assert f"the commit of model: {NEW} -> {'b' * 40}" in capsys.readouterr().err
    checkpoints = tmp_path / "run" / "checkpoints"
    export(checkpoints / "step_1", tmp_path / "exported", "float32", print)
    assert commit("model", f"someone/small@{NEW}") == NEW  # where its tokenizer is from
