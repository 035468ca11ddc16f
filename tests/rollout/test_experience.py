"""Dynamic sampling: which groups a step ends up learning from."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grpo_eqx import GRPOConfig, GRPOTrainer
from grpo_eqx.data.prompts import Prompt, PromptSource
from grpo_eqx.rollout.experience import Experience
from grpo_eqx.tracking.metrics import StepClock

SMALL: dict[str, Any] = {
    "data": str(Path(__file__).parents[1] / "problems.jsonl"),
    "prompts_per_step": 8,
    "num_generations": 2,
    "eval_problems": 8,
}


class Scripted:
    """A reward that varies within the groups of every fourth prompt it sees, and counts them."""

    __name__ = "scripted"

    def __init__(self, dull: tuple[float, float] = (1.0, 1.0)) -> None:
        self.groups = 0
        self.dull = dull

    def __call__(self, *, completions: list[str], **columns: Any) -> list[float]:
        rewards = []
        for _ in range(len(completions) // 2):
            rewards += [1.0, 0.0] if self.groups % 4 == 0 else self.dull
            self.groups += 1
        return rewards


def length_of_text(*, completions: list[str], **columns: Any) -> list[float]:
    return [float(len(text)) for text in completions]


@dataclasses.dataclass(frozen=True)
class Few(PromptSource):
    """As many problems as are asked for."""

    size: int
    name: str = "few"

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Prompt:
        return Prompt(f"What is {index} plus 1?", {"answer": index + 1})


def collect(
    reward_funcs: Sequence[Callable[..., Any]] = (),
    data: PromptSource | None = None,
    scripted: Scripted | None = None,
    **fields: Any,
) -> tuple[Experience, GRPOTrainer, Scripted]:
    """A step's experience under a scripted reward, and others of weight 0.001."""
    scripted = scripted or Scripted()
    weights = (1.0, *[0.001] * len(reward_funcs))
    cfg = GRPOConfig(**{**SMALL, "max_completion_length": 8, "reward_weights": weights, **fields})
    trainer = GRPOTrainer(
        cfg, reward_funcs=[scripted, *reward_funcs], train_data=data, eval_data=data
    )
    state = dataclasses.replace(trainer.state, next_batch=5)
    started = trainer.experiences.start(state)
    experience = trainer.experiences.collect(started, state, StepClock())
    return experience, trainer, scripted


@pytest.fixture(scope="module")
def refilled() -> tuple[Experience, GRPOTrainer, Scripted]:
    return collect(dynamic_sampling=True, max_generation_batches=8)


@pytest.mark.slow
def test_groups_without_variance_are_replaced_by_fresh_prompts(
    refilled: tuple[Experience, GRPOTrainer, Scripted],
) -> None:
    experience, _, scripted = refilled
    groups = experience.groups
    totals = groups.rewards.total
    assert (totals.max(axis=1) > totals.min(axis=1)).all()
    # Two of eight groups vary in each rollout, so that eight of them take four rollouts.
    assert scripted.groups == 32
    assert experience.num_batches == 4
    assert experience.metrics["dynamic_sampling/num_generation_batches"] == 4
    assert experience.metrics["dynamic_sampling/frac_groups_dropped"] == 24 / 32
    assert len({prompt.text for prompt in groups.prompts}) == 8


def test_prompts_completions_and_rewards_stay_together() -> None:
    experience, trainer, _ = collect(
        [length_of_text], dynamic_sampling=True, max_generation_batches=3,
        multi_objective_aggregation="normalize_then_sum", max_completion_length=24,
    )  # fmt: skip
    groups, rollout = experience.groups, experience.groups.rollout
    ids, mask = np.asarray(rollout.prompts.ids), np.asarray(rollout.prompts.mask)
    tokens = groups.completions.ids
    for p, prompt in enumerate(groups.prompts):
        assert ids[p][mask[p]].tolist() == trainer.tokenizer.encode_prompts([prompt])[0]
        for g in range(2):
            length = int(rollout.lengths[p, g])
            assert groups.completions.ids[p][g] == rollout.completion_ids[p, g, :length].tolist()
    texts = trainer.tokenizer.decode_completions([row for group in tokens for row in group])
    assert texts == [text for group in groups.completions.texts for text in group]
    assert groups.rewards.each[1].reshape(-1).tolist() == [len(text) for text in texts]
    finished = groups.completions.finished
    assert (finished == np.asarray(rollout.finished)).all()
    assert 0 < finished.sum() < finished.size


def test_metrics_are_of_everything_that_was_generated(
    refilled: tuple[Experience, GRPOTrainer, Scripted],
) -> None:
    """The kept groups alone would say nothing about how good the policy is."""
    experience, _, _ = refilled
    metrics = experience.metrics
    assert metrics["reward"] == pytest.approx(0.75 + 0.25 / 2)
    assert metrics["frac_reward_zero_std"] == 0.75
    assert experience.generated.completion_lengths.shape == (32, 2)
    assert experience.generated.prompt_lengths.shape == (32,)


def test_what_the_bound_leaves_unfilled_stays() -> None:
    experience, _, scripted = collect(dynamic_sampling=True, max_generation_batches=2)
    totals = experience.groups.rewards.total
    assert scripted.groups == 16
    assert (totals.max(axis=1) > totals.min(axis=1)).sum() == 4
    assert experience.metrics["dynamic_sampling/frac_groups_dropped"] == 12 / 16


@pytest.mark.slow
def test_groups_that_failures_leave_without_variance_are_replaced() -> None:
    scripted = Scripted(dull=(float("nan"), 1.0))
    experience, _, _ = collect(
        scripted=scripted, dynamic_sampling=True, max_generation_batches=8,
        reward_failures="drop", max_failed_rewards=0.5,
    )  # fmt: skip
    assert experience.num_batches == 4
    assert experience.metrics["rewards/scripted/num_failed"] == 24  # of all that was generated
    assert not experience.groups.rewards.dropped.any()
    totals = experience.groups.rewards.total
    assert (totals.max(axis=1) > totals.min(axis=1)).all()


def test_without_it_a_step_is_one_rollout() -> None:
    experience, trainer, scripted = collect()
    assert scripted.groups == 8
    assert experience.num_batches == 1
    assert not any(name.startswith("dynamic_sampling") for name in experience.metrics)
    expected = [prompt.text for prompt in trainer.prompts.batch(5).prompts]
    assert [prompt.text for prompt in experience.groups.prompts] == expected


@pytest.mark.slow
@pytest.mark.parametrize("size", [8, 11, 16])
def test_small_data_give_no_prompt_twice_in_a_step(size: int) -> None:
    """Eight rollouts of eight prompts go through the data several times."""
    experience, trainer, _ = collect(
        data=Few(size=size), dynamic_sampling=True, max_generation_batches=8
    )
    groups = experience.groups
    assert len(set(groups.prompt_indices.tolist())) == 8
    problems = trainer.prompts.data.prompts
    assert [problems[i] for i in groups.prompt_indices] == groups.prompts
    totals = groups.rewards.total
    assert (totals.max(axis=1) > totals.min(axis=1)).sum() >= 4


@pytest.mark.slow
def test_a_penalty_on_length_alone_does_not_make_a_group_teach() -> None:
    experience, _, _ = collect(
        dynamic_sampling=True, max_generation_batches=2, overlong_buffer=1 - 1e-9
    )
    rewards = experience.groups.rewards
    assert rewards.names == ("scripted", "soft_overlong")
    assert rewards.weights == (1.0, 1.0)
    assert experience.metrics["dynamic_sampling/frac_groups_dropped"] == 12 / 16


def test_groups_that_the_loss_leaves_out_do_not_teach() -> None:
    """Eight tokens are too few for any completion to end."""
    experience, _, _ = collect(
        dynamic_sampling=True, max_generation_batches=2, mask_truncated_completions=True
    )
    assert not experience.groups.completions.finished.any()
    assert experience.metrics["dynamic_sampling/frac_groups_dropped"] == 1
