"""What a step learns from: groups of completions with their rewards."""

import dataclasses
import functools
from collections.abc import Mapping

import numpy as np
from jaxtyping import Bool

from grpo_eqx.config import GRPOConfig
from grpo_eqx.data.batches import PromptBatches
from grpo_eqx.data.prompts import Prompt
from grpo_eqx.data.tokenizer import ChatTokenizer
from grpo_eqx.generation import Completions, Rollout
from grpo_eqx.models.qwen2 import Qwen2
from grpo_eqx.objective import informative_groups
from grpo_eqx.programs import Programs
from grpo_eqx.rewards import SOFT_OVERLONG, RewardRunner, Rewards
from grpo_eqx.tracking.metrics import StepClock, completion_metrics


@dataclasses.dataclass(frozen=True)
class Experience:
    """`P` prompts with `G` completions each, rewarded."""

    prompts: list[Prompt]
    rollout: Rollout
    completions: Completions
    rewards: Rewards

    @property
    def num_tokens(self) -> int:
        """Tokens of all completions, each with its prompt."""
        G = self.rewards.total.shape[1]
        prompts = int(self.rollout.prompt_mask.sum())
        return G * prompts + int(self.completions.lengths.sum())


@dataclasses.dataclass(frozen=True)
class Collected:
    """What collecting for a step came to."""

    experience: Experience
    """What the step learns from."""
    num_batches: int
    """Batches of prompts that were taken."""
    num_tokens: int
    """Tokens of everything that was generated, each completion with its prompt."""
    metrics: Mapping[str, float]
    """Of everything that was generated, also of what was then replaced."""


class ExperienceCollector:
    """Generates and rewards completions, until enough groups can teach something."""

    def __init__(
        self,
        programs: Programs,
        prompts: PromptBatches,
        tokenizer: ChatTokenizer,
        rewards: RewardRunner,
        cfg: GRPOConfig,
    ):
        """**Arguments:** what makes and judges completions. With `cfg.dynamic_sampling`, groups
        that can teach nothing are replaced by fresh prompts, in `cfg.max_generation_batches`
        rollouts a step at most (DAPO, arXiv 2503.14476, section 3.2); what is left then stays.
        """
        self.programs = programs
        self.prompts = prompts
        self.tokenizer = tokenizer
        self.rewards = rewards
        self.cfg = cfg

    def collect(self, model: Qwen2, step: int, first_batch: int, clock: StepClock) -> Collected:
        """Experience under a model, from batches of prompts from `first_batch` on.

        Gives the clock laps for rollout and reward.
        """
        most = self.cfg.max_generation_batches if self.cfg.dynamic_sampling else 1
        assert most is not None  # resolved
        made = [self._generate(model, step, first_batch, 0, clock)]
        kept = made[0]
        while len(made) < most and not self._teaches(kept).all():
            made.append(self._generate(model, step, first_batch, len(made), clock))
            kept = self._replace(kept, made[-1])
        rewards = functools.reduce(Rewards.joined, [each.rewards for each in made])
        completions = functools.reduce(Completions.joined, [each.completions for each in made])
        metrics = rewards.metrics() | completion_metrics(completions.lengths, completions.finished)
        if self.cfg.dynamic_sampling:
            dropped = 1 - self._teaches(kept).sum() / len(rewards.total)
            metrics["dynamic_sampling/num_generation_batches"] = float(len(made))
            metrics["dynamic_sampling/frac_groups_dropped"] = float(dropped)
        return Collected(kept, len(made), sum(each.num_tokens for each in made), metrics)

    def _generate(
        self, model: Qwen2, step: int, first_batch: int, index: int, clock: StepClock
    ) -> Experience:
        """The step's rollout number `index`, rewarded."""
        prompts = self.prompts.batch(first_batch + index)
        rollout = self.programs.generate(
            model, prompts.ids, prompts.mask, step,
            num_generations=self.cfg.num_generations, first_row=index * len(prompts.prompts),
        )  # fmt: skip
        completions = Completions.of(rollout, self.tokenizer)
        clock.lap("rollout")
        rewards = self.rewards(prompts.prompts, completions.texts, completions.ids)
        clock.lap("reward")
        return Experience(prompts.prompts, rollout, completions, rewards)

    def _teaches(self, experience: Experience) -> Bool[np.ndarray, " P"]:
        """True for groups that say which of their completions are better.

        A penalty on length alone is no such thing, nor are completions that the loss leaves out.
        """
        rewards = experience.rewards.without(SOFT_OVERLONG)
        informative = informative_groups(rewards, self.cfg.multi_objective_aggregation)
        if self.cfg.mask_truncated_completions:
            return informative & experience.completions.finished.any(axis=1)
        return informative

    def _replace(self, kept: Experience, fresh: Experience) -> Experience:
        """The kept groups, with fresh ones that teach in place of those that do not."""
        P = len(kept.prompts)
        source = np.arange(P, dtype=np.int32)
        teaching = P + np.flatnonzero(self._teaches(fresh))
        idle = np.flatnonzero(~self._teaches(kept))[: len(teaching)]
        source[idle] = teaching[: len(idle)]
        prompts = kept.prompts + fresh.prompts
        return Experience(
            [prompts[i] for i in source],
            self.programs.replace_groups(kept.rollout, fresh.rollout, source),
            kept.completions.joined(fresh.completions).of_prompts(source),
            kept.rewards.joined(fresh.rewards).of_prompts(source),
        )
