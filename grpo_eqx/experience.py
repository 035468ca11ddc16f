"""What a step learns from: groups of completions with their rewards."""

import dataclasses
from collections.abc import Mapping

import numpy as np
from jaxtyping import Bool

from grpo_eqx._types import MultiObjectiveAggregation
from grpo_eqx.data.batches import PromptBatches
from grpo_eqx.data.prompts import Prompt
from grpo_eqx.data.tokenizer import ChatTokenizer
from grpo_eqx.generation import Completions, Rollout
from grpo_eqx.models.qwen2 import Qwen2
from grpo_eqx.objective import informative_groups
from grpo_eqx.programs import Programs
from grpo_eqx.rewards import RewardRunner, Rewards
from grpo_eqx.tracking.metrics import StepClock, completion_metrics


@dataclasses.dataclass(frozen=True)
class Experience:
    """`P` prompts with `G` completions each, rewarded."""

    prompts: list[Prompt]
    rollout: Rollout
    completions: Completions
    rewards: Rewards
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Of everything that was generated for it, also of what was then replaced."""


class ExperienceCollector:
    """Generates and rewards completions, until enough groups can teach something."""

    def __init__(
        self,
        programs: Programs,
        prompts: PromptBatches,
        tokenizer: ChatTokenizer,
        rewards: RewardRunner,
        *,
        num_generations: int,
        max_generation_batches: int,
        aggregation: MultiObjectiveAggregation,
    ):
        """**Arguments:** what makes and judges completions. With `max_generation_batches` above 1,
        groups whose rewards are all equal are replaced by fresh prompts, in so many rollouts a step
        at most (dynamic sampling, DAPO, arXiv 2503.14476, section 3.2); whatever is equal then
        stays.
        """
        self.programs = programs
        self.prompts = prompts
        self.tokenizer = tokenizer
        self.rewards = rewards
        self.num_generations = num_generations
        self.max_generation_batches = max_generation_batches
        self.aggregation = aggregation
        self.next_batch = 0
        """The next batch of prompts; with dynamic sampling a step may take several."""

    def collect(self, model: Qwen2, step: int, clock: StepClock) -> Experience:
        """The experience of a step, under a model, with laps for rollout and reward."""
        kept = self._generate(model, step, 0, clock)
        rewards, completions = kept.rewards, kept.completions
        batches = 1
        while batches < self.max_generation_batches and not self._informative(kept).all():
            fresh = self._generate(model, step, batches, clock)
            rewards = rewards.joined(fresh.rewards)
            completions = completions.joined(fresh.completions)
            kept = self._replace(kept, fresh)
            batches += 1
        metrics = rewards.metrics() | completion_metrics(completions.lengths, completions.finished)
        if self.max_generation_batches > 1:
            dropped = 1 - self._informative(kept).sum() / len(rewards.total)
            metrics["dynamic_sampling/num_generation_batches"] = float(batches)
            metrics["dynamic_sampling/frac_groups_dropped"] = float(dropped)
        return dataclasses.replace(kept, metrics=metrics)

    def _generate(self, model: Qwen2, step: int, batch: int, clock: StepClock) -> Experience:
        """The step's rollout number `batch`, rewarded."""
        prompts = self.prompts.batch(self.next_batch)
        self.next_batch += 1
        rollout = self.programs.generate(
            model, prompts.ids, prompts.mask, step,
            num_generations=self.num_generations, first_row=batch * len(prompts.prompts),
        )  # fmt: skip
        completions = Completions.of(rollout, self.tokenizer)
        clock.lap("rollout")
        rewards = self.rewards(prompts.prompts, completions.texts, completions.ids)
        clock.lap("reward")
        return Experience(prompts.prompts, rollout, completions, rewards)

    def _informative(self, experience: Experience) -> Bool[np.ndarray, " P"]:
        return informative_groups(experience.rewards, self.aggregation)

    def _replace(self, kept: Experience, fresh: Experience) -> Experience:
        """The kept groups, with fresh ones that teach in place of those that do not."""
        P = len(kept.prompts)
        source = np.arange(P, dtype=np.int32)
        teaching = P + np.flatnonzero(self._informative(fresh))
        idle = np.flatnonzero(~self._informative(kept))[: len(teaching)]
        source[idle] = teaching[: len(idle)]
        prompts = kept.prompts + fresh.prompts
        return Experience(
            [prompts[i] for i in source],
            self.programs.replace_groups(kept.rollout, fresh.rollout, source),
            kept.completions.joined(fresh.completions).of_prompts(source),
            kept.rewards.joined(fresh.rewards).of_prompts(source),
        )
