"""Collection of rollouts: prompts are completed and rewarded, until enough groups can teach."""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Int

from grpo_eqx.common.errors import RewardError, UserError
from grpo_eqx.common.logged_metrics import check_unused
from grpo_eqx.data.batches import PromptBatches
from grpo_eqx.data.tokenizer import ChatTokenizer
from grpo_eqx.data.trajectory import Address, Trajectory
from grpo_eqx.distributed.exchange import own_part
from grpo_eqx.generation import PendingSamples, Sampled, Sampler
from grpo_eqx.generation.routes import replaced
from grpo_eqx.generation.sampler import NO_COUNTS, SamplingCounts
from grpo_eqx.objective import informative_groups
from grpo_eqx.rewards import RewardRunner, Rewards
from grpo_eqx.rewards.overlong import SOFT_OVERLONG
from grpo_eqx.rollout.in_flight import GroupsInFlight, staleness_of
from grpo_eqx.rollout.rollout import Rollout, rewarded
from grpo_eqx.settings.config import GRPOConfig
from grpo_eqx.tracking.metrics import (
    StepClock,
    completion_metrics,
    failure_metrics,
    id_metrics,
    reward_metrics,
    tool_metrics,
)
from grpo_eqx.tracking.step_profiler import phase
from grpo_eqx.training.state import TrainState

_COUNTS = "counts"
"""Name of the decoding steps, slots and tokens of what was sampled ahead, beside the groups."""


class _Started(NamedTuple):
    """A rollout that the sampler is working on."""

    indices: Int[np.ndarray, " P"] | None
    """Positions of its prompts in the data; `None` where they are known when it has ended."""
    pending: PendingSamples
    step: int


def _never() -> bool:
    return False


class _Whole(PendingSamples):
    """Completions that have ended before."""

    def __init__(self, trajectories: list[Trajectory], counts: SamplingCounts):
        self._sampled = Sampled(trajectories, counts)

    def result(self) -> Sampled:
        return self._sampled


class SamplingInterrupted(Exception):  # noqa: N818
    """Sampling has stopped before a step could take its groups."""


class RolloutCollector:
    """Samples and rewards completions, until enough groups can teach something."""

    def __init__(
        self,
        sampler: Sampler,
        prompts: PromptBatches,
        tokenizer: ChatTokenizer,
        rewards: RewardRunner,
        cfg: GRPOConfig,
        mesh: jax.sharding.Mesh,
        without_token: Collection[int] = (),
        acts: bool = False,
    ):
        """With `cfg.dynamic_sampling`, groups that can teach nothing are replaced by fresh prompts,
        in at most `cfg.max_generation_batches` rollouts a step (DAPO, arXiv 2503.14476, section
        3.2); what is left then stays.

        **Arguments:**

        - `sampler`, `prompts`, `tokenizer`: what completes prompts, their order, and what decodes
          completions.
        - `rewards`: the reward functions.
        - `cfg`: the resolved settings.
        - `mesh`: the devices, where routes of experts stay.
        - `without_token`: ids of the model for which the tokenizer has no token.
        - `acts`: whether completions act in environments, which no checkpoint holds.
        """
        self.sampler = sampler
        self.prompts = prompts
        self.tokenizer = tokenizer
        self.rewards = rewards
        self.cfg = cfg
        self.mesh = mesh
        self.without_token = without_token
        self._acts = acts
        self._started: _Started | None = None
        self._in_flight: GroupsInFlight | None = None
        self._carried: dict[str, np.ndarray] = {}
        self._step = self._num_waiting = 0
        self._is_interrupted: Callable[[], bool] = _never
        self._is_dropped = False

    def start(self, state: TrainState) -> None:
        """Has the sampler begin the next step's first rollout, and does not wait for it."""
        if not self.cfg.samples_ahead:
            self._started = self._start(state, 0)

    def settle(self, *, stops: bool = False) -> None:
        """Waits for what is sampled ahead, if anything: `carried` then has it.

        **Arguments:**

        - `stops`: whether the run is to end soon. Nothing is waited for that cannot stop early,
          which a resumed run draws anew.
        """
        if self._started is not None and self.cfg.samples_ahead:
            if stops and not self._stops_early:
                return
            assert self._in_flight is not None
            made = self._started.pending.result()
            self._in_flight.update(made.trajectories, made.ended)
            counts = made.counts.steps, made.counts.slots, made.counts.tokens
            self._carried = {**self._in_flight.arrays(), _COUNTS: np.array(counts, np.int32)}

    def __enter__(self) -> "RolloutCollector":
        return self

    def __exit__(self, *_: object) -> None:
        """Drops a rollout that was started and is not wanted any more."""
        if self._started is not None and jax.process_count() == 1:
            self._is_dropped = True
            self._started.pending.wait()
        self._started = self._in_flight = None
        self._carried, self._is_dropped = {}, False
        self._is_interrupted = _never

    @property
    def _stops_early(self) -> bool:
        """Whether sampling can stop before enough groups are whole, with all tokens so far.

        Of environments, nothing would be left. Several processes would have to agree, of which not
        all sample where sampling has devices of its own.
        """
        alone = self.cfg.rollout_devices is None or jax.process_count() == 1
        return self.cfg.carried_steps > 0 and not self._acts and alone

    def next(
        self,
        state: TrainState,
        clock: StepClock,
        on_sampled: Callable[[Rollout], None] = lambda rollout: None,
        is_interrupted: Callable[[], bool] = lambda: False,
    ) -> tuple[Rollout, Rollout]:
        """Collects what the next step learns from.

        **Arguments:**

        - `state`: the state before the step, as it was at `start`, if that was called.
        - `clock`: its laps are for rollout and reward.
        - `on_sampled`: called once, with what the step learns from, as soon as that is known:
          without dynamic sampling before it is rewarded, so that devices compute meanwhile.
        - `is_interrupted`: returns whether the run is to end; asked while completions are sampled
          that a later run can go on with, in a thread where they are sampled ahead.

        **Returns:** the rollout to learn from, and everything that was sampled for it. Raises
        `SamplingInterrupted` where the run is to end; `carried` then has all tokens so far.
        """
        self._is_interrupted = is_interrupted
        most = self.cfg.max_generation_batches if self.cfg.dynamic_sampling else 1
        assert most is not None  # resolved
        started = self._started = self._started or self._start(state, 0)
        self._step = started.step
        kept = self._sampled(started, clock)
        self._started = None
        self._is_interrupted = _never  # what is taken now is in no checkpoint
        # Environments are free for other completions once they have rewarded theirs.
        starts_early = most == 1 and not self._acts
        if starts_early:
            self._start_ahead(state, 1, is_interrupted)
        if most == 1:
            on_sampled(kept)
        kept = self._rewarded(kept, started, clock)
        made, number = kept, 1
        while number < most and not self.teaches(kept).all():
            started = self._start(state, number)
            fresh = self._rewarded(self._sampled(started, clock), started, clock)
            kept, made = self._replaced(kept, fresh), made.joined(fresh)
            number += 1
        if not starts_early:
            self._start_ahead(state, number, is_interrupted)
        if most > 1:
            on_sampled(kept)
        return kept, made

    def metrics(self, kept: Rollout, made: Rollout) -> dict[str, float]:
        """Returns the metrics of what `next` returned: of everything that was sampled."""
        rewards = _rewards(made)
        metrics = {
            **reward_metrics(rewards),
            **failure_metrics(rewards),
            **completion_metrics(made.num_written, made.finished),
            **id_metrics([each.ids for each in made.trajectories], self.without_token),
            **tool_metrics(made.acted),
        }
        if self.cfg.dynamic_sampling:
            dropped = 1 - self.teaches(kept).sum() / len(rewards.total)
            metrics["dynamic_sampling/num_generation_batches"] = float(self.num_batches(made))
            metrics["dynamic_sampling/frac_groups_dropped"] = float(dropped)
        if self._in_flight is not None:
            metrics |= self._staleness(kept, made)
        return metrics

    def _staleness(self, kept: Rollout, made: Rollout) -> dict[str, float]:
        """Returns how old the tokens are that a step learns from, and how busy slots were."""
        assert self._in_flight is not None
        of_tokens = staleness_of(kept.groups, self._step)
        metrics = {
            "staleness/mean": float(of_tokens.mean()),
            "staleness/max": float(of_tokens.max()),
            "staleness/frac_stale_tokens": float((of_tokens > 0).mean()),
            "staleness/num_groups_waiting": float(self._num_waiting),
        }
        if made.counts.slots:
            metrics["staleness/frac_idle_slots"] = 1 - made.counts.tokens / made.counts.slots
        return metrics

    def carried(self) -> dict[str, np.ndarray]:
        """Returns the groups in flight, for `TrainState.carried`.

        They are as the last step has left them, or `settle`, or `SamplingInterrupted`.
        """
        return self._carried

    def logged(self, made: Rollout, metrics: Collection[str]) -> dict[str, float]:
        """Returns the metrics that reward functions have logged of everything that was sampled.

        **Arguments:**

        - `made`: everything that was sampled.
        - `metrics`: names of the step's own metrics, for which it raises `RewardError`.
        """
        logged = _rewards(made).logged
        means = {} if logged is None else logged.means()
        for name in means:
            try:
                check_unused("a reward function", name, metrics, of_step=True)
            except UserError as error:
                raise RewardError(str(error)) from error
        return means

    def num_batches(self, made: Rollout) -> int:
        """Returns the batches of prompts that a rollout is of."""
        return len(made.prompts) // self.cfg.prompts_per_step

    def _start_ahead(
        self, state: TrainState, number: int, is_interrupted: Callable[[], bool]
    ) -> None:
        """Starts the first rollout of the step after `state`, which takes `number` batches."""
        if self.cfg.samples_ahead and state.step + 1 < self.cfg.steps:
            self._is_interrupted = is_interrupted
            self._started = self._start(state, number, steps_ahead=1)

    @phase("rollout")
    def _start(self, state: TrainState, number: int, *, steps_ahead: int = 0) -> _Started:
        """Starts rollout `number` of a step, on batch `state.next_batch + number` of prompts."""
        self.sampler.set_weights(state.model, state.step)
        if self.cfg.max_staleness:
            step = state.step + steps_ahead
            pending = self._carry_on(state.next_batch + number, step, state.carried)
            return _Started(None, pending.in_background() if steps_ahead else pending, step)
        indices, P = self.prompts.indices(state.next_batch + number), self.cfg.prompts_per_step
        tokens = self.prompts.data.tokens
        trajectories = [
            Trajectory(tokens[i], Address(state.step, number * P + row, sample))
            for row, i in enumerate(indices)
            for sample in range(self.cfg.num_generations)
        ]
        problems = [self.prompts.data.prompts[i] for i in indices]
        pending = self.sampler.submit(
            trajectories, problems=problems, prompt_width=self.prompts.width(indices)
        )
        return _Started(indices, pending, state.step)

    def _carry_on(self, taken: int, step: int, carried: Mapping[str, np.ndarray]) -> PendingSamples:
        """Goes on with the groups in flight, and those that follow, until enough are whole.

        **Arguments:**

        - `taken`: number of rollouts before.
        - `step`: the step that learns from them.
        - `carried`: groups in flight of a checkpoint, where there are none yet.
        """
        cfg, counts = self.cfg, NO_COUNTS
        if self._in_flight is None:
            # Of dynamic sampling, nobody knows how many batches it takes.
            num_batches = None if cfg.dynamic_sampling else cfg.steps
            self._in_flight = GroupsInFlight(
                self.prompts, cfg.num_generations, cfg.carried_steps, num_batches
            )
            if carried:
                self._in_flight.restore(carried, restarts=self._acts)
            if _COUNTS in carried:
                steps, slots, tokens = carried[_COUNTS].tolist()
                counts = SamplingCounts(steps, slots, tokens=tokens)
        # Of what is sampled ahead, the weights are those of the step before.
        self._in_flight.begin(taken, step - cfg.samples_ahead)
        trajectories, problems = self._in_flight.trajectories(), self.prompts.data.prompts
        if self._in_flight.are_enough(()):
            return _Whole(trajectories, counts)
        return self.sampler.submit(
            trajectories,
            problems=[None if x is None else problems[x.index] for x in self._in_flight.places],
            prompt_width=self.prompts.widths[-1],
            until=self._are_enough if cfg.carried_steps else None,
        )

    def _are_enough(self, ended: Sequence[int]) -> bool:
        """Notes completions that have ended; returns whether sampling is to stop."""
        assert self._in_flight is not None
        if self._is_dropped or self._in_flight.are_enough(ended):
            return True
        return self._stops_early and self._is_interrupted()

    @phase("rollout")
    def _sampled(self, started: _Started, clock: StepClock) -> Rollout:
        """Waits until prompts are completed."""
        made, problems = started.pending.result(), self.prompts.data.prompts
        if started.indices is None:
            rollout = self._taken(made)
        else:
            G = self.cfg.num_generations
            rollout = Rollout(
                [problems[i] for i in started.indices],
                [made.trajectories[i : i + G] for i in range(0, len(made.trajectories), G)],
                self.tokenizer, started.indices, counts=made.counts, routes=made.routes,
                acted=made.acted,
            )  # fmt: skip
        clock.lap("rollout")
        return rollout

    def _taken(self, made: Sampled) -> Rollout:
        """Takes groups that are whole of those in flight."""
        assert self._in_flight is not None
        self._in_flight.update(made.trajectories, made.ended)
        if not self._in_flight.are_enough(()):
            self._carried = self._in_flight.arrays()
            raise SamplingInterrupted
        taken, problems = self._in_flight.take(), self.prompts.data.prompts
        self._num_waiting = self._in_flight.num_waiting
        self._carried = self._in_flight.arrays()
        acted, places = made.acted, [each.place for each in taken]
        if acted is not None:
            G = self.cfg.num_generations
            numbers = [place * G + sample for place in places for sample in range(G)]
            acted = dataclasses.replace(acted.of(numbers), waited=acted.waited)
        return Rollout(
            [problems[each.index] for each in taken],
            [each.group for each in taken],
            self.tokenizer,
            np.array([each.index for each in taken]),
            counts=made.counts,
            acted=acted,
            # The process that has their environments rewards them.
            own=own_part(places, len(self._in_flight.places)),
        )

    @phase("reward")
    def _rewarded(self, rollout: Rollout, started: _Started, clock: StepClock) -> Rollout:
        rewards = rewarded(self.rewards, rollout, started.step)
        started.pending.release()
        clock.lap("reward")
        return rollout.with_rewards(rewards)

    def teaches(self, rollout: Rollout) -> Bool[np.ndarray, " P"]:
        """Returns True for groups that say which of their completions are better.

        A length penalty alone does not count, nor do completions that the loss leaves out.
        """
        rewards = _rewards(rollout).without(SOFT_OVERLONG)
        informative = informative_groups(
            rewards.total, rewards.each, rewards.weights, self.cfg.multi_objective_aggregation
        )
        if self.cfg.mask_truncated_completions:
            return informative & (rollout.finished & ~rollout.left_out).any(axis=1)
        return informative

    def _replaced(self, kept: Rollout, fresh: Rollout) -> Rollout:
        """The kept groups, with fresh ones that teach in place of those that do not."""
        assert kept.indices is not None
        assert fresh.indices is not None
        source = _replacements(kept.indices, self.teaches(kept), fresh.indices, self.teaches(fresh))
        routes = None
        if kept.routes is not None and fresh.routes is not None:
            routes = replaced(kept.routes, fresh.routes, source, self.mesh)
        return dataclasses.replace(kept.joined(fresh).of_prompts(source), routes=routes)


def _rewards(rollout: Rollout) -> Rewards:
    assert rollout.rewards is not None, "the rollout is not rewarded yet"
    return rollout.rewards


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
