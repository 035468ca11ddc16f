"""What training changes of a model is what its filter says."""

import dataclasses
from pathlib import Path

import equinox as eqx
import jax
import numpy as np
import pytest

from grpo_eqx import GRPOConfig, GRPOTrainer
from grpo_eqx.models.families.qwen2 import Qwen2

SMALL = {
    "data": str(Path(__file__).parents[1] / "problems.jsonl"),
    "prompts_per_step": 8,
    "num_generations": 2,
    "max_completion_length": 16,
    "eval_problems": 8,
}


class HeadOnly(Qwen2):
    """Trains the embeddings, which are the head too, and nothing else."""

    @property
    def trainable(self) -> "HeadOnly":
        nothing = jax.tree.map(lambda _: False, self)
        return eqx.tree_at(lambda m: m.embed_tokens, nothing, True)


@pytest.mark.slow
def test_only_what_is_trainable_changes_and_has_moments(tmp_path) -> None:
    whole = GRPOTrainer(GRPOConfig(**SMALL))
    fields = {f.name: getattr(whole.state.model, f.name) for f in dataclasses.fields(Qwen2)}
    before = jax.tree.map(np.asarray, fields)
    trainer = GRPOTrainer(
        GRPOConfig(**SMALL, output_dir=tmp_path, steps=1),
        model=HeadOnly(**fields),
        tokenizer=whole.tokenizer,
    )
    trainer.fit()
    model = trainer.state.model
    assert np.any(np.asarray(model.embed_tokens) != before["embed_tokens"])
    for after, was in zip(
        jax.tree.leaves(model.layers), jax.tree.leaves(before["layers"]), strict=True
    ):
        np.testing.assert_array_equal(after, was)
    moments = sum(x.size for x in jax.tree.leaves(trainer.state.opt_state) if x.ndim)
    assert moments == 2 * model.embed_tokens.size  # of AdamW


@pytest.mark.slow
def test_it_counts_steps_batches_and_tokens(tmp_path) -> None:
    trainer = GRPOTrainer(GRPOConfig(**SMALL, output_dir=tmp_path, steps=2))
    assert (trainer.state.step, trainer.state.next_batch, trainer.state.num_tokens) == (0, 0, 0)
    history = trainer.fit().history
    assert (trainer.state.step, trainer.state.next_batch) == (2, 2)
    assert trainer.state.num_tokens == history[-1]["num_tokens"] > 0
