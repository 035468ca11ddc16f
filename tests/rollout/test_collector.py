"""Dynamic sampling: which groups a step ends up learning from."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from grpo_eqx import GRPOConfig, GRPOTrainer
from grpo_eqx.common.errors import RewardError
from grpo_eqx.data.prompts import Prompt, PromptSource
from grpo_eqx.rewards.logged import TrainerState
from grpo_eqx.rollout.rollout import Rollout
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


class Collected(NamedTuple):
    kept: Rollout
    made: Rollout
    metrics: dict[str, float]
    trainer: GRPOTrainer
    scripted: Scripted

    @property
    def num_batches(self) -> int:
        return self.trainer.rollouts.num_batches(self.made)


def collect(
    reward_funcs: Sequence[Callable[..., Any]] = (),
    data: PromptSource | None = None,
    scripted: Scripted | None = None,
    **fields: Any,
) -> Collected:
    """A step's rollout under a scripted reward, and others of weight 0.001."""
    scripted = scripted or Scripted()
    weights = (1.0, *[0.001] * len(reward_funcs))
    cfg = GRPOConfig(**{**SMALL, "max_completion_length": 8, "reward_weights": weights, **fields})
    trainer = GRPOTrainer(
        cfg, reward_funcs=[scripted, *reward_funcs], train_data=data, eval_data=data
    )
    state = dataclasses.replace(trainer.state, next_batch=5)
    known: list[Rollout] = []
    kept, made = trainer.rollouts.next(state, StepClock(), known.append)
    (learned_from,) = known
    assert learned_from.groups == kept.groups
    return Collected(kept, made, trainer.rollouts.metrics(kept, made), trainer, scripted)


@pytest.fixture(scope="module")
def refilled() -> Collected:
    return collect(dynamic_sampling=True, max_generation_batches=8)


@pytest.mark.slow
def test_groups_without_variance_are_replaced_by_fresh_prompts(
    refilled: Collected,
) -> None:
    experience, groups, scripted = refilled, refilled.kept, refilled.scripted
    assert groups.rewards is not None
    totals = groups.rewards.total
    assert (totals.max(axis=1) > totals.min(axis=1)).all()
    # Two of eight groups vary in each rollout, so that eight of them take four rollouts.
    assert scripted.groups == 32
    assert experience.num_batches == 4
    assert experience.metrics["dynamic_sampling/num_generation_batches"] == 4
    assert experience.metrics["dynamic_sampling/frac_groups_dropped"] == 24 / 32
    assert len({prompt.text for prompt in groups.prompts}) == 8


def test_prompts_completions_and_rewards_stay_together() -> None:
    experience = collect(
        [length_of_text], dynamic_sampling=True, max_generation_batches=3,
        multi_objective_aggregation="normalize_then_sum", max_completion_length=24,
    )  # fmt: skip
    kept, tokenizer = experience.kept, experience.trainer.tokenizer
    for prompt, group in zip(kept.prompts, kept.groups, strict=True):
        for each in group:
            assert each.prompt_ids == tokenizer.encode_prompts([prompt])[0]
    texts = tokenizer.decode_completions([each.ids.tolist() for each in kept.trajectories])
    assert texts == [text for group in kept.texts for text in group]
    assert kept.rewards is not None
    assert kept.rewards.each[1].reshape(-1).tolist() == [len(text) for text in texts]
    finished = [each.ids[-1] in tokenizer.eos_ids for each in kept.trajectories]
    assert kept.finished.reshape(-1).tolist() == finished
    assert 0 < sum(finished) < len(finished)


def logging(
    *, completions: list[str], log_extra: Any, log_metric: Any, trainer_state: Any, **columns: Any
) -> list[float]:
    assert trainer_state == TrainerState(global_step=0, max_steps=50)
    log_extra("text", completions)
    log_metric("calls/completions", len(completions))
    return [0.0] * len(completions)


def test_logged_columns_stay_with_their_completions_and_metrics_are_of_all() -> None:
    experience = collect([logging], dynamic_sampling=True, max_generation_batches=2, steps=50)
    kept, made, rollouts = experience.kept, experience.made, experience.trainer.rollouts
    assert kept.rewards is not None
    assert kept.rewards.logged is not None
    assert kept.rewards.logged.table() == {"text": [x for texts in kept.texts for x in texts]}
    assert made.rewards is not None
    assert made.rewards.logged is not None
    assert made.rewards.logged.metrics == {"calls/completions": [16, 16]}
    assert rollouts.logged(made, ["reward"]) == {"calls/completions": 16}
    with pytest.raises(RewardError, match="'calls/completions', which the run logs already"):
        rollouts.logged(made, ["calls/completions"])


def test_a_completion_says_where_its_draws_are_and_which_weights_drew_it() -> None:
    kept = collect(dynamic_sampling=True, max_generation_batches=2).kept
    rows = [group[0].address.prompt for group in kept.groups]
    assert len(set(rows)) == 8
    assert max(rows) >= 8  # of the second rollout
    for group in kept.groups:
        assert [each.address.sample for each in group] == [0, 1]
        for each in group:
            assert (each.versions == 0).all()
            assert len(each.versions) == len(each.sampler_logps) == len(each) > 0
            assert each.written.all()


def test_a_rollout_that_was_started_is_used_unless_the_run_has_ended() -> None:
    trainer = collect().trainer
    earlier, later = (dataclasses.replace(trainer.state, step=step) for step in (3, 4))

    def steps() -> set[int]:
        kept, _ = trainer.rollouts.next(later, StepClock())
        return {each.address.step for each in kept.trajectories}

    with trainer.rollouts:
        trainer.rollouts.start(earlier)
        assert steps() == {3}
        trainer.rollouts.start(earlier)
    assert steps() == {4}


def test_metrics_are_of_everything_that_was_generated(
    refilled: Collected,
) -> None:
    """The kept groups alone would say nothing about how good the policy is."""
    experience, metrics = refilled, refilled.metrics
    assert metrics["reward"] == pytest.approx(0.75 + 0.25 / 2)
    assert metrics["frac_reward_zero_std"] == 0.75
    assert experience.made.lengths.shape == (32, 2)
    assert experience.made.prompt_lengths.shape == (32,)


def test_what_the_bound_leaves_unfilled_stays() -> None:
    experience = collect(dynamic_sampling=True, max_generation_batches=2)
    assert experience.kept.rewards is not None
    totals = experience.kept.rewards.total
    assert experience.scripted.groups == 16
    assert (totals.max(axis=1) > totals.min(axis=1)).sum() == 4
    assert experience.metrics["dynamic_sampling/frac_groups_dropped"] == 12 / 16


@pytest.mark.slow
def test_groups_that_failures_leave_without_variance_are_replaced() -> None:
    scripted = Scripted(dull=(float("nan"), 1.0))
    experience = collect(
        scripted=scripted, dynamic_sampling=True, max_generation_batches=8,
        reward_failures="drop", max_failed_rewards=0.5,
    )  # fmt: skip
    assert experience.num_batches == 4
    assert experience.metrics["rewards/scripted/num_failed"] == 24  # of all that was generated
    assert experience.kept.rewards is not None
    assert not experience.kept.rewards.dropped.any()
    totals = experience.kept.rewards.total
    assert (totals.max(axis=1) > totals.min(axis=1)).all()


def test_without_it_a_step_is_one_rollout() -> None:
    experience = collect()
    assert experience.scripted.groups == 8
    assert experience.num_batches == 1
    assert not any(name.startswith("dynamic_sampling") for name in experience.metrics)
    prompts = experience.trainer.prompts
    expected = [prompts.data.prompts[i] for i in prompts.indices(5)]
    assert experience.kept.prompts == experience.made.prompts == expected


@pytest.mark.slow
@pytest.mark.parametrize("size", [8, 11, 16])
def test_small_data_give_no_prompt_twice_in_a_step(size: int) -> None:
    """Eight rollouts of eight prompts go through the data several times."""
    experience = collect(data=Few(size=size), dynamic_sampling=True, max_generation_batches=8)
    groups = experience.kept
    assert groups.indices is not None
    assert groups.rewards is not None
    assert len(set(groups.indices.tolist())) == 8
    problems = experience.trainer.prompts.data.prompts
    assert [problems[i] for i in groups.indices] == groups.prompts
    totals = groups.rewards.total
    assert (totals.max(axis=1) > totals.min(axis=1)).sum() >= 4


@pytest.mark.slow
def test_a_penalty_on_length_alone_does_not_make_a_group_teach() -> None:
    experience = collect(dynamic_sampling=True, max_generation_batches=2, overlong_buffer=1 - 1e-9)
    rewards = experience.kept.rewards
    assert rewards is not None
    assert rewards.names == ("scripted", "soft_overlong")
    assert rewards.weights == (1.0, 1.0)
    assert experience.metrics["dynamic_sampling/frac_groups_dropped"] == 12 / 16


def test_groups_that_the_loss_leaves_out_do_not_teach() -> None:
    """Eight tokens are too few for any completion to end."""
    experience = collect(
        dynamic_sampling=True, max_generation_batches=2, mask_truncated_completions=True
    )
    assert not experience.kept.finished.any()
    assert experience.metrics["dynamic_sampling/frac_groups_dropped"] == 1
