"""A rollout's completions on the host."""

import dataclasses

import numpy as np
import pytest

from grpo_eqx.data.acted import Acted, ToolCounts
from grpo_eqx.data.prompts import Prompt
from grpo_eqx.data.tokenizer import ChatTokenizer
from grpo_eqx.data.trajectory import Address, Trajectory
from grpo_eqx.generation import SamplingCounts
from grpo_eqx.models.pretrained import model_folder
from grpo_eqx.rewards import Rewards
from grpo_eqx.rollout.rollout import Rollout


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer.from_pretrained(model_folder("tiny_qwen2"))


def rollout_of(lengths: np.ndarray, written: np.ndarray, tokenizer: ChatTokenizer) -> Rollout:
    """Random tokens in completions of the given lengths."""
    rng = np.random.default_rng(0)
    groups = [
        [
            Trajectory(
                [5, 6, 7][: p + 1], Address(0, p, g), rng.integers(4, 64, n), written[p, g, :n],
                finish_reason="stop" if n > 3 else "length",
            )
            for g, n in enumerate(row)
        ]
        for p, row in enumerate(lengths)
    ]  # fmt: skip
    prompts = [Prompt(f"problem {p}", {}) for p in range(len(lengths))]
    counts = SamplingCounts(6, 36, 18.0)
    return Rollout(prompts, groups, tokenizer, np.arange(len(lengths)), counts=counts)


LENGTHS = np.array([[5, 2, 1], [3, 4, 6]])


ALL = np.ones((2, 3, 8), bool)


def test_lengths_are_of_all_tokens_and_the_model_wrote_some(tokenizer: ChatTokenizer) -> None:
    written = np.random.default_rng(1).random((2, 3, 8)) < 0.5
    rollout = rollout_of(LENGTHS, written, tokenizer)
    np.testing.assert_array_equal(rollout.lengths, LENGTHS)
    counts = [[written[p, g, :n].sum() for g, n in enumerate(row)] for p, row in enumerate(LENGTHS)]
    np.testing.assert_array_equal(rollout.num_written, counts)
    assert rollout.prompt_lengths.tolist() == [1, 2]
    assert rollout.num_tokens == LENGTHS.sum() + 3 * (1 + 2)


def test_prompts_are_joined_and_chosen_with_all_that_belongs_to_them(
    tokenizer: ChatTokenizer,
) -> None:
    rollout = rollout_of(LENGTHS, ALL, tokenizer)
    twice = rollout.joined(rollout)
    assert twice.counts == SamplingCounts(12, 72, 36.0)
    both = twice.of_prompts([3, 0])
    np.testing.assert_array_equal(both.lengths, LENGTHS[::-1])
    np.testing.assert_array_equal(both.num_written, LENGTHS[::-1])
    np.testing.assert_array_equal(both.finished, LENGTHS[::-1] > 3)
    assert both.texts == rollout.texts[::-1]
    assert both.prompts == rollout.prompts[::-1]
    assert both.indices is not None
    assert both.indices.tolist() == [1, 0]


def test_lost_completions_have_no_part_in_the_loss(tokenizer: ChatTokenizer) -> None:
    each = np.zeros((1, 2, 3))
    failed = np.array([[[True, False, False], [False, False, False]]])
    rewards = Rewards.of(["judge"], each, [1.0], failed)
    dialogues = [[{"role": "assistant", "content": f"turn {n}"}] for n in range(6)]
    contents = [f"made {n}" for n in range(6)]
    acted = Acted(contents, dialogues, [None] * 6, [ToolCounts(lost=n in (2, 4)) for n in range(6)])
    rollout = dataclasses.replace(rollout_of(LENGTHS, ALL, tokenizer), rewards=rewards, acted=acted)
    assert rollout.left_out.tolist() == [[True, False, True], [False, True, False]]
    chosen = rollout.of_prompts([1])
    assert chosen.left_out.tolist() == [[False, True, False]]
    assert chosen.shown_texts == [["turn 3", "turn 4", "turn 5"]]
    assert [prompt.text for prompt in rollout.shown_prompts] == ["made 0", "made 3"]
