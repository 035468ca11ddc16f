"""Dynamic sampling: which groups a step ends up learning from."""

from typing import Any

import numpy as np
import pytest

from grpo_eqx import GRPOConfig, GRPOTrainer
from grpo_eqx.experience import Experience
from grpo_eqx.tracking.metrics import StepClock

SMALL = {"prompts_per_step": 8, "num_generations": 2, "max_completion_length": 8}


class Scripted:
    """A reward that varies within the groups of every fourth prompt it sees, and counts them."""

    __name__ = "scripted"

    def __init__(self) -> None:
        self.groups = 0

    def __call__(self, *, completions: list[str], **columns: Any) -> list[float]:
        rewards = []
        for _ in range(len(completions) // 2):
            rewards += [1.0, 0.0] if self.groups % 4 == 0 else [1.0, 1.0]
            self.groups += 1
        return rewards


def collect(**fields: Any) -> tuple[Experience, GRPOTrainer, Scripted]:
    scripted = Scripted()
    trainer = GRPOTrainer(GRPOConfig(**SMALL, **fields), reward_funcs=[scripted])
    return trainer.experiences.collect(trainer.state.model, 0, StepClock()), trainer, scripted


@pytest.fixture(scope="module")
def refilled() -> tuple[Experience, GRPOTrainer, Scripted]:
    return collect(dynamic_sampling=True, max_generation_batches=8)


def test_groups_without_variance_are_replaced_by_fresh_prompts(
    refilled: tuple[Experience, GRPOTrainer, Scripted],
) -> None:
    experience, trainer, scripted = refilled
    totals = experience.rewards.total
    assert (totals.max(axis=1) > totals.min(axis=1)).all()
    # Two of eight groups vary in each rollout, so that eight of them take four rollouts.
    assert scripted.groups == 32
    assert trainer.experiences.next_batch == 4
    assert experience.metrics["dynamic_sampling/num_generation_batches"] == 4
    assert experience.metrics["dynamic_sampling/frac_groups_dropped"] == 24 / 32
    assert len({prompt.text for prompt in experience.prompts}) == 8


def test_prompts_completions_and_tokens_stay_together(
    refilled: tuple[Experience, GRPOTrainer, Scripted],
) -> None:
    experience, trainer, _ = refilled
    rollout = experience.rollout
    ids, mask = np.asarray(rollout.prompt_ids), np.asarray(rollout.prompt_mask)
    tokens = experience.completions.ids
    for p, prompt in enumerate(experience.prompts):
        assert ids[p][mask[p]].tolist() == trainer.tokenizer.encode([prompt.text])[0]
        for g in range(2):
            length = int(rollout.lengths[p, g])
            assert (
                experience.completions.ids[p][g] == rollout.completion_ids[p, g, :length].tolist()
            )
    texts = trainer.tokenizer.decode([row for group in tokens for row in group])
    assert texts == [text for group in experience.completions.texts for text in group]


def test_metrics_are_of_everything_that_was_generated(
    refilled: tuple[Experience, GRPOTrainer, Scripted],
) -> None:
    """The kept groups alone would say nothing about how good the policy is."""
    metrics = refilled[0].metrics
    assert metrics["reward"] == pytest.approx(0.75 + 0.25 / 2)
    assert metrics["frac_reward_zero_std"] == 0.75


def test_what_the_bound_leaves_unfilled_stays() -> None:
    experience, _, scripted = collect(dynamic_sampling=True, max_generation_batches=2)
    totals = experience.rewards.total
    assert scripted.groups == 16
    assert (totals.max(axis=1) > totals.min(axis=1)).sum() == 4
    assert experience.metrics["dynamic_sampling/frac_groups_dropped"] == 12 / 16


def test_without_it_a_step_is_one_rollout() -> None:
    experience, trainer, scripted = collect()
    assert scripted.groups == 8
    assert trainer.experiences.next_batch == 1
    assert not any(name.startswith("dynamic_sampling") for name in experience.metrics)
