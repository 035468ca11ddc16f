"""A rollout's completions on the host."""

import jax.numpy as jnp
import numpy as np
import pytest

from grpo_eqx.data.tokenizer import ChatTokenizer
from grpo_eqx.generation import Completions, Prompts, Rollout
from grpo_eqx.models.pretrained import model_folder


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer.from_pretrained(model_folder("tiny_qwen2"))


def rollout_of(lengths: np.ndarray, written: np.ndarray | None) -> Rollout:
    """Random tokens in completions of the given lengths."""
    P, Tc = len(lengths), int(lengths.max()) + 2
    ids = np.random.default_rng(0).integers(4, 64, (*lengths.shape, Tc))
    return Rollout(
        Prompts(jnp.ones((P, 3), jnp.int32), jnp.ones((P, 3), bool)),
        jnp.asarray(ids, jnp.int32),
        jnp.asarray(np.arange(Tc) < lengths[..., None]),
        jnp.zeros(ids.shape, jnp.float32),
        jnp.asarray(lengths > 3),
        None if written is None else jnp.asarray(written),
    )


LENGTHS = np.array([[5, 2, 1], [3, 4, 6]])


def test_lengths_are_of_all_tokens_and_the_model_wrote_some(tokenizer: ChatTokenizer) -> None:
    written = np.random.default_rng(1).random((2, 3, 8)) < 0.5
    completions = Completions.of(rollout_of(LENGTHS, written), tokenizer)
    np.testing.assert_array_equal(completions.lengths, LENGTHS)
    counts = [[written[p, g, :n].sum() for g, n in enumerate(row)] for p, row in enumerate(LENGTHS)]
    np.testing.assert_array_equal(completions.num_written, counts)
    every = Completions.of(rollout_of(LENGTHS, None), tokenizer)
    np.testing.assert_array_equal(every.num_written, LENGTHS)


def test_prompts_are_joined_and_chosen_with_all_that_belongs_to_them(
    tokenizer: ChatTokenizer,
) -> None:
    completions = Completions.of(rollout_of(LENGTHS, None), tokenizer)
    both = completions.joined(completions).of_prompts(np.array([3, 0]))
    np.testing.assert_array_equal(both.lengths, LENGTHS[::-1])
    np.testing.assert_array_equal(both.num_written, LENGTHS[::-1])
    np.testing.assert_array_equal(both.finished, LENGTHS[::-1] > 3)
    assert both.texts == completions.texts[::-1]
