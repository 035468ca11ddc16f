"""A rollout: prompts with their completions, and what these are worth."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from grpo_eqx.data.acted import Acted, as_text
from grpo_eqx.data.prompts import Prompt
from grpo_eqx.data.tokenizer import ChatTokenizer
from grpo_eqx.data.trajectory import Group, Trajectory
from grpo_eqx.distributed.exchange import gather_json, gather_rows, own_share, raise_on_all_hosts
from grpo_eqx.generation.routes import Routes
from grpo_eqx.generation.sampler import NO_COUNTS, SamplingCounts
from grpo_eqx.rewards import RewardRunner, Rewards
from grpo_eqx.rewards.logged import Logged


@dataclasses.dataclass(frozen=True, eq=False)
class Rollout:
    """`P` prompts with `G` completions each."""

    prompts: list[Prompt]
    groups: list[Group]
    tokenizer: ChatTokenizer
    indices: Int[np.ndarray, " P"] | None = None
    """Positions of the prompts in the data that they are from."""
    rewards: Rewards | None = None
    counts: SamplingCounts = NO_COUNTS
    """Work that sampling took."""
    routes: Routes | None = None
    """Experts that the sampler's routers chose, on the devices."""
    acted: Acted | None = None
    """Their dialogues, one group after the other, where completions act."""
    own: slice | None = None
    """Prompts whose completions this process rewards; by default its share of all."""

    @functools.cached_property
    def lengths(self) -> Int[np.ndarray, "P G"]:
        """Number of tokens in each completion, those of its forks included."""
        return self._of_each(lambda x: sum(map(len, x.all_of_sample)), int)

    @functools.cached_property
    def num_written(self) -> Int[np.ndarray, "P G"]:
        """Number of tokens that the model wrote in each completion, and in its forks."""
        return self._of_each(lambda x: sum(y.written.sum() for y in x.all_of_sample), int)

    @functools.cached_property
    def finished(self) -> Bool[np.ndarray, "P G"]:
        """True where the completion ended by itself, and all of its forks."""
        return self._of_each(lambda x: all(y.is_finished for y in x.all_of_sample), bool)

    @property
    def left_out(self) -> Bool[np.ndarray, "P G"]:
        """True for completions without a part in the loss: a reward or an environment failed."""
        assert self.rewards is not None
        dropped = self.rewards.dropped
        return (
            dropped if self.acted is None else dropped | np.reshape(self.acted.lost, dropped.shape)
        )

    @functools.cached_property
    def prompt_lengths(self) -> Int[np.ndarray, " P"]:
        """Number of tokens in each prompt."""
        return np.array([len(group[0].prompt_ids) for group in self.groups], int)

    @property
    def num_tokens(self) -> int:
        """Tokens of all completions, each with its prompt."""
        prompts = (len(x.prompt_ids) for each in self.trajectories for x in each.all_of_sample)
        return sum(prompts) + int(self.lengths.sum())

    @functools.cached_property
    def ids(self) -> list[list[list[int]]]:
        """Tokens of each completion, `[P][G]`."""
        return [[each.ids.tolist() for each in group] for group in self.groups]

    @functools.cached_property
    def texts(self) -> list[list[str]]:
        """Text of each completion, `[P][G]`."""
        ids = [ids for group in self.ids for ids in group]
        texts = iter(self.tokenizer.decode_completions(ids))
        return [list(itertools.islice(texts, len(group))) for group in self.groups]

    @property
    def shown_prompts(self) -> list[Prompt]:
        """Prompts for people to read, with what the environment of the first completion added."""
        if self.acted is None:
            return self.prompts
        contents = self.acted.prompts[:: len(self.groups[0])]
        return [
            dataclasses.replace(prompt, content=content)
            for prompt, content in zip(self.prompts, contents, strict=True)
        ]

    @property
    def shown_texts(self) -> list[list[str]]:
        """Texts for people to read, `[P][G]`; in dialogues, calls and answers are in brackets."""
        if self.acted is None:
            return self.texts
        texts = map(as_text, self.acted.messages)
        return [list(itertools.islice(texts, len(group))) for group in self.groups]

    @property
    def tagged_texts(self) -> list[list[str]]:
        """Texts as built-in rewards read them, `[P][G]`: with the layout's tags."""
        return self.tokenizer.with_tags(self.prompts, self.ids, self.texts)

    @property
    def trajectories(self) -> Iterator[Trajectory]:
        """All completions, one group after the other."""
        return itertools.chain.from_iterable(self.groups)

    def with_rewards(self, rewards: Rewards) -> "Rollout":
        """Returns the rollout rewarded; it keeps what was derived from it, such as texts."""
        rewarded = dataclasses.replace(self, rewards=rewards)
        vars(rewarded).update({k: x for k, x in vars(self).items() if k not in vars(rewarded)})
        return rewarded

    def of_prompts(self, indices: Sequence[int] | Int[np.ndarray, " Q"]) -> "Rollout":
        """Returns the prompts at `indices` with their completions, in that order.

        Counts, of sampling and of calls, and routes are left out.
        """
        G = len(self.groups[0])
        numbers = [p * G + g for p in indices for g in range(G)]
        return Rollout(
            [self.prompts[i] for i in indices],
            [self.groups[i] for i in indices],
            self.tokenizer,
            None if self.indices is None else self.indices[indices],
            None if self.rewards is None else self.rewards.of_prompts(np.asarray(indices)),
            acted=None if self.acted is None else self.acted.of(numbers),
        )

    def joined(self, other: "Rollout") -> "Rollout":
        """Returns these prompts followed by those of `other`, without routes; counts add up."""
        indices = rewards = None
        if self.indices is not None and other.indices is not None:
            indices = np.concatenate([self.indices, other.indices])
        if self.rewards is not None and other.rewards is not None:
            rewards = self.rewards.joined(other.rewards)
        acted = None
        if self.acted is not None and other.acted is not None:
            acted = self.acted.joined(other.acted)
        return Rollout(
            self.prompts + other.prompts, self.groups + other.groups, self.tokenizer,
            indices, rewards, self.counts.plus(other.counts), acted=acted,
        )  # fmt: skip

    def _of_each(self, value: Callable[[Trajectory], Any], dtype: type) -> np.ndarray:
        return np.array([[value(each) for each in group] for group in self.groups], dtype)


def rewarded(runner: RewardRunner, rollout: Rollout, step: int = 0) -> Rewards:
    """Each process rewards the completions of its own prompts; then all have all rewards.

    What a reward function raises in one process ends all of them, and the share of its failures is
    that of all.

    **Arguments:**

    - `runner`: the reward functions.
    - `rollout`: the prompts with their completions.
    - `step`: the step that they are for, of which functions may be told.
    """
    P, G = rollout.lengths.shape
    share = range(P)[own_share(P) if rollout.own is None else rollout.own]

    def own_rewards() -> tuple[Float[np.ndarray, "p twice_funcs G"], Logged | None]:
        if len(share) == 0:
            return np.zeros((0, 2 * len(runner.funcs), G)), Logged(0, {}, {})
        mine = rollout if len(share) == P else rollout.of_prompts(share)
        own = runner(mine.prompts, mine.texts, mine.ids, mine.tagged_texts, mine.acted, step=step)
        failed = np.zeros(own.each.shape) if own.failed is None else own.failed.astype(float)
        return np.concatenate([own.each, failed]).swapaxes(0, 1), own.logged

    rows, logged = raise_on_all_hosts(own_rewards)
    each, failed = np.split(gather_rows(rows).swapaxes(0, 1), 2)
    if runner.can_log:
        assert logged is not None
        parts = gather_json([logged.number, logged.metrics, logged.columns])
        logged = functools.reduce(Logged.joined, [Logged(*part) for part in parts])
    rewards = runner.combined(each, failed.astype(bool), logged if runner.can_log else None)
    runner.check_failures(rewards)
    return rewards
