"""Collecting experience: groups of completions, rewarded and scored."""

import dataclasses
import functools
from collections.abc import Collection, Mapping
from statistics import fmean
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Float, Int

from grpo_eqx.data.batches import PromptBatch, PromptBatches
from grpo_eqx.data.prompts import Prompt
from grpo_eqx.data.tokenizer import ChatTokenizer
from grpo_eqx.distributed.exchange import gather_rows, own_share, raise_on_all_hosts
from grpo_eqx.generation import Completions, Prompts, Rollout, SlotCounts
from grpo_eqx.objective import informative_groups
from grpo_eqx.rewards import RewardRunner, Rewards
from grpo_eqx.rewards.overlong import SOFT_OVERLONG
from grpo_eqx.run.spec import Passes
from grpo_eqx.settings.config import GRPOConfig
from grpo_eqx.sharding.arrays import fetch
from grpo_eqx.tracking.metrics import (
    StepClock,
    completion_metrics,
    failure_metrics,
    id_metrics,
    reward_metrics,
)
from grpo_eqx.tracking.step_profiler import phase
from grpo_eqx.training.batch import Batch
from grpo_eqx.training.packing import Packing
from grpo_eqx.training.programs import Programs
from grpo_eqx.training.state import TrainState


@dataclasses.dataclass(frozen=True)
class Groups:
    """`P` prompts with `G` completions each, rewarded."""

    prompts: list[Prompt]
    prompt_indices: Int[np.ndarray, " P"]
    """Indices of the problems in the data."""
    prompt_lengths: Int[np.ndarray, " P"]
    rollout: Rollout
    completions: Completions
    rewards: Rewards


class Prepared(NamedTuple):
    """Inputs of the updates on a rollout, besides advantages."""

    packings: list[Packing]
    """Rows of each share of the rollout, one for each update of a pass over it."""
    old_logps: Float[Array, "P G Tc"] | None
    ref_logps: Float[Array, "P G Tc"] | None


@dataclasses.dataclass(frozen=True)
class Generated:
    """Lengths of everything generated for a step, and the decoding steps that it took."""

    prompt_lengths: Int[np.ndarray, " Q"]
    completion_lengths: Int[np.ndarray, "Q G"]
    num_decode_steps: int
    num_slots: int
    """Slots summed over those steps, idle ones included."""
    cache_share: float
    """Share of the slots' caches that attention read, summed over those slots and steps."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all completions, each with its prompt."""
        G = self.completion_lengths.shape[1]
        return int(G * self.prompt_lengths.sum() + self.completion_lengths.sum())


@dataclasses.dataclass(frozen=True)
class Experience:
    """Groups that a step learns from, and everything that was generated for it."""

    groups: Groups
    """The groups that the step learns from."""
    prepared: Prepared
    num_batches: int
    """Batches of prompts that were taken."""
    generated: Generated
    """Everything that was generated, replaced groups included."""
    metrics: Mapping[str, float]
    """Metrics of everything that was generated."""

    def batch(self, advantages: Float[np.ndarray, "P G"]) -> Batch:
        """Returns the batch of the step's updates."""
        return Batch(
            self.groups.rollout, advantages, self.prepared.old_logps, self.prepared.ref_logps
        )

    def packing_metrics(self) -> dict[str, float]:
        """Returns the share of padding in the updates' rows, and how evenly devices share them."""
        packings = self.prepared.packings
        return {
            "perf/padding_share": fmean(packing.padding_share for packing in packings),
            "perf/balance": fmean(packing.balance for packing in packings),
        }


@dataclasses.dataclass(frozen=True)
class StartedRollout:
    """Prompts whose completions the devices are working on."""

    prompts: PromptBatch
    rollout: Rollout
    counts: SlotCounts


class ExperienceCollector:
    """Generates and rewards completions, until enough groups can teach something."""

    def __init__(
        self,
        programs: Programs,
        prompts: PromptBatches,
        tokenizer: ChatTokenizer,
        rewards: RewardRunner,
        cfg: GRPOConfig,
        passes: Passes,
        without_token: Collection[int] = (),
    ):
        """**Arguments:** the objects that generate, reward and score completions; the ids of the
        model for which the tokenizer has no token.

        With `cfg.dynamic_sampling`, groups that can teach nothing are replaced by fresh prompts, in
        at most `cfg.max_generation_batches` rollouts a step (DAPO, arXiv 2503.14476, section 3.2);
        what is left then stays.
        """
        self.programs = programs
        self.prompts = prompts
        self.tokenizer = tokenizer
        self.rewards = rewards
        self.cfg = cfg
        self.passes = passes
        self.without_token = without_token

    @phase("rollout")
    def start(self, state: TrainState, index: int = 0) -> StartedRollout:
        """Has the devices generate rollout `index` of the next step, and does not wait for it.

        Its prompts are batch `state.next_batch + index`.
        """
        prompts = self.prompts.batch(state.next_batch + index)
        rollout, counts = self.programs.generate(
            state.model, Prompts(prompts.ids, prompts.mask), state.step,
            num_generations=self.cfg.num_generations, first_row=index * len(prompts.prompts),
        )  # fmt: skip
        return StartedRollout(prompts, rollout, counts)

    def collect(self, started: StartedRollout, state: TrainState, clock: StepClock) -> Experience:
        """Collects a step's experience, from its first rollout on.

        **Arguments:** the rollout that `start` began with the same state; a clock, whose laps are
        for rollout and reward.
        """
        most = self.cfg.max_generation_batches if self.cfg.dynamic_sampling else 1
        assert most is not None  # resolved
        first, completions = self._wait(started, clock)
        # Devices score while the host computes rewards, where these cannot change what is kept.
        prompt_lengths, rollout = started.prompts.lengths, started.rollout
        prepared = None
        if most == 1:
            prepared = self._prepare(state, rollout, prompt_lengths, completions.lengths)
        made, all_generated = [self._rewarded(started, completions, clock)], [first]
        kept = made[0]
        while len(made) < most and not self._teaches(kept).all():
            more = self.start(state, len(made))
            generated, completions = self._wait(more, clock)
            all_generated.append(generated)
            made.append(self._rewarded(more, completions, clock))
            kept = self._replace(kept, made[-1])
        if prepared is None:
            prepared = self._prepare(
                state, kept.rollout, kept.prompt_lengths, kept.completions.lengths
            )
        rewards = functools.reduce(Rewards.joined, [each.rewards for each in made])
        completions = functools.reduce(Completions.joined, [each.completions for each in made])
        metrics = {
            **reward_metrics(rewards),
            **failure_metrics(rewards),
            **completion_metrics(completions.lengths, completions.finished),
            **id_metrics(completions.all_ids, self.without_token),
        }
        if self.cfg.dynamic_sampling:
            dropped = 1 - self._teaches(kept).sum() / len(rewards.total)
            metrics["dynamic_sampling/num_generation_batches"] = float(len(made))
            metrics["dynamic_sampling/frac_groups_dropped"] = float(dropped)
        if self.cfg.reward_failures == "drop":  # in every step: another program is compiled for it
            kept = self._without_dropped(kept)
        return Experience(kept, prepared, len(made), _joined(all_generated), metrics)

    def _without_dropped(self, groups: Groups) -> Groups:
        """Leaves completions on which a reward function failed out of all that the loss counts."""
        dropped = groups.rewards.dropped
        return dataclasses.replace(
            groups,
            completions=groups.completions.without_written(dropped),
            rollout=self.programs.without_dropped(groups.rollout, dropped),
        )

    @phase("score")
    def _prepare(
        self,
        state: TrainState,
        rollout: Rollout,
        prompt_lengths: Int[np.ndarray, " P"],
        lengths: Int[np.ndarray, "P G"],
    ) -> Prepared:
        """Plans the rows of all updates on a rollout, and starts the passes of other policies."""
        programs, shares = self.programs, self.cfg.steps_per_generation
        packings = [
            programs.packing(prompt_lengths[share::shares], lengths[share::shares])
            for share in range(shares)
        ]
        old_logps = ref_logps = None
        reference = state.reference_model if self.passes.reference else None
        if self.passes.old_policy or reference is not None:
            whole = packings[0] if shares == 1 else programs.packing(prompt_lengths, lengths)
            if self.passes.old_policy:
                old_logps = programs.score(state.model, rollout, whole).logps
            if reference is not None:
                ref_logps = programs.score(reference, rollout, whole, is_reference=True).logps
        return Prepared(packings, old_logps, ref_logps)

    @phase("rollout")
    def _wait(self, started: StartedRollout, clock: StepClock) -> tuple[Generated, Completions]:
        """Waits until the devices have completed the prompts."""
        completions = Completions.of(started.rollout, self.tokenizer)
        counts = fetch(started.counts)
        clock.lap("rollout")
        generated = Generated(
            started.prompts.lengths, completions.lengths,
            int(counts.steps), int(counts.slots), float(counts.cache_share),
        )  # fmt: skip
        return generated, completions

    @phase("reward")
    def _rewarded(
        self, started: StartedRollout, completions: Completions, clock: StepClock
    ) -> Groups:
        prompts = started.prompts
        rewards = rewarded(self.rewards, prompts.prompts, completions)
        clock.lap("reward")
        return Groups(
            prompts.prompts, prompts.indices, prompts.lengths, started.rollout, completions, rewards
        )

    def _teaches(self, groups: Groups) -> Bool[np.ndarray, " P"]:
        """True for groups that say which of their completions are better.

        A length penalty alone does not count, nor do completions that the loss leaves out.
        """
        rewards = groups.rewards.without(SOFT_OVERLONG)
        informative = informative_groups(
            rewards.total, rewards.each, rewards.weights, self.cfg.multi_objective_aggregation
        )
        if self.cfg.mask_truncated_completions:
            return informative & (groups.completions.finished & ~rewards.dropped).any(axis=1)
        return informative

    def _replace(self, kept: Groups, fresh: Groups) -> Groups:
        """The kept groups, with fresh ones that teach in place of those that do not."""
        source = _replacements(
            kept.prompt_indices, self._teaches(kept), fresh.prompt_indices, self._teaches(fresh)
        )
        prompts = kept.prompts + fresh.prompts
        return Groups(
            [prompts[i] for i in source],
            np.concatenate([kept.prompt_indices, fresh.prompt_indices])[source],
            np.concatenate([kept.prompt_lengths, fresh.prompt_lengths])[source],
            self.programs.replace_groups(kept.rollout, fresh.rollout, source),
            kept.completions.joined(fresh.completions).of_prompts(source),
            kept.rewards.joined(fresh.rewards).of_prompts(source),
        )


def _replacements(
    kept: Int[np.ndarray, " P"],
    kept_teach: Bool[np.ndarray, " P"],
    fresh: Int[np.ndarray, " P"],
    fresh_teach: Bool[np.ndarray, " P"],
) -> Int[np.ndarray, " P"]:
    """The group for each place of a step: of those kept below `P`, then of the fresh ones.

    Small data come round again within a step: a fresh group takes the place of its own prompt, if
    that is there, so that no prompt is in a step twice.
    """
    source = np.arange(len(kept), dtype=np.int32)
    place_of = {int(prompt): place for place, prompt in enumerate(kept)}
    free = np.flatnonzero(~kept_teach).tolist()
    for group in np.flatnonzero(fresh_teach).tolist():
        prompt = int(fresh[group])
        place = place_of.get(prompt, free[0] if free else None)
        if place in free:
            free.remove(place)
            place_of.pop(int(kept[place]), None)
            place_of[prompt] = place
            source[place] = len(kept) + group
    return source


def rewarded(runner: RewardRunner, prompts: list[Prompt], completions: Completions) -> Rewards:
    """Each process rewards the completions of its share of the prompts; then all have all rewards.

    What a reward function raises in one process ends all of them, and the share of its failures is
    that of all.
    """
    share = np.arange(len(prompts))[own_share(len(prompts))]
    mine = completions if len(share) == len(prompts) else completions.of_prompts(share)

    def rows() -> Float[np.ndarray, "p twice_funcs G"]:
        if len(share) == 0:
            return np.zeros((0, 2 * len(runner.funcs), completions.finished.shape[1]))
        own_prompts = [prompts[i] for i in share]
        own = runner(own_prompts, mine.texts, mine.ids, mine.tagged_texts(own_prompts))
        failed = np.zeros(own.each.shape) if own.failed is None else own.failed.astype(float)
        return np.concatenate([own.each, failed]).swapaxes(0, 1)

    each, failed = np.split(gather_rows(raise_on_all_hosts(rows)).swapaxes(0, 1), 2)
    rewards = runner.combined(each, failed.astype(bool))
    runner.check_failures(rewards)
    return rewards


def _joined(parts: list[Generated]) -> Generated:
    return Generated(
        np.concatenate([part.prompt_lengths for part in parts]),
        np.concatenate([part.completion_lengths for part in parts]),
        sum(part.num_decode_steps for part in parts),
        sum(part.num_slots for part in parts),
        sum(part.cache_share for part in parts),
    )
