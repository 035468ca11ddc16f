"""Runs that replay routers' choices: of what they log, and what they refuse."""

import itertools
import shutil
from pathlib import Path
from typing import Any

import jax
import pytest

from grpo_eqx import GRPOConfig, GRPOTrainer, UserError
from grpo_eqx.data.tokenizer import ChatTokenizer
from grpo_eqx.loop.metric_names import metric_names
from grpo_eqx.models import Decoder, Qwen3MoeConfig, save_pretrained
from grpo_eqx.models.pretrained import model_folder
from grpo_eqx.tracking.metric_registry import find_metric
from grpo_eqx.tracking.metrics import OF_THE_MACHINE

PROBLEMS = Path(__file__).with_name("problems.jsonl")


@pytest.fixture(scope="module")
def model_with_experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    tokenizer = ChatTokenizer.from_pretrained(model_folder("tiny_qwen2"))
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer.tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
    )
    save_pretrained(Decoder.init(config, jax.random.key(0), std=0.2), folder)
    tokenizer.save_pretrained(folder)
    return folder


def settings(model: Path, folder: Path, **others: Any) -> dict[str, Any]:
    return {
        "model": str(model), "data": str(PROBLEMS), "steps": 1, "prompts_per_step": 8,
        "num_generations": 2, "max_completion_length": 4, "eval_problems": 8,
        "output_dir": str(folder), "router_replay": True, **others,
    }  # fmt: skip


@pytest.mark.slow
def test_choices_are_replayed_in_all_that_a_step_does(
    model_with_experts: Path, tmp_path: Path
) -> None:
    """With slots that are refilled, groups that are replaced, shares, and a reference."""
    cfg = GRPOConfig(
        **settings(
            model_with_experts, tmp_path, max_num_seqs=8, rollout_dtype="int8",
            dynamic_sampling=True, max_generation_batches=2, num_iterations=2,
            steps_per_generation=2, beta=0.1, top_entropy_quantile=0.5,
        )
    )  # fmt: skip
    rewards = itertools.cycle([0.0, 0.0, 0.0, 1.0])  # every other group is replaced

    def of_its_turn(completions: list[str], **columns: object) -> list[float]:
        return [next(rewards) for _ in completions]

    trainer = GRPOTrainer(cfg, reward_funcs=[of_its_turn])
    run, programs = trainer._run, trainer.programs
    shapes = programs.compiler.num_shapes
    known = metric_names(
        trainer.cfg, trainer.rewards, programs.updater.options.objective, run.passes, run.model
    )
    (logged,) = trainer.fit().history
    of_the_step = {name for name in logged if not name.startswith(OF_THE_MACHINE)}
    assert of_the_step == {"step", *known}
    assert [name for name in logged if find_metric(name) is None] == []
    assert logged["dynamic_sampling/num_generation_batches"] == 2
    assert logged["skipped_updates"] == 0
    assert 0.5 < logged["moe/routing_agreement"] <= 1
    # Compiled ahead for what they are called with: the policy's pass, that of the reference, that
    # of a share, and one update for all shares.
    assert (shapes["score"], shapes["update"]) == (3, 1)


def test_a_model_without_experts_is_refused_before_it_is_loaded(
    small_model: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(small_model, tmp_path / "model"))
    for weights in folder.glob("*.safetensors"):
        weights.unlink()
    with pytest.raises(UserError, match="router_replay is on, and the model has no experts"):
        GRPOTrainer(GRPOConfig(**settings(folder, tmp_path / "run")))
