"""Calls of reward functions: the arguments they receive, and the returns that are accepted."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from grpo_eqx.data.prompts import Prompt
from grpo_eqx.errors import RewardError, UserError

RewardFunc = Callable[..., Sequence[float | None]]
"""TRL's reward signature, `f(prompts, completions, **columns)`: lists in, one float per row out.

`columns` holds `completion_ids`, each completion's tokens, and the problems' other columns, each as
a list. `None` in place of a float means that the function does not apply to that completion.
"""


@dataclasses.dataclass(frozen=True)
class Rewards:
    """Rewards of `P` prompts with `G` completions each; NaN where a function does not apply."""

    names: tuple[str, ...]
    each: Float[np.ndarray, "funcs P G"]
    """Every function's own rewards, unweighted."""
    total: Float[np.ndarray, "P G"]
    """Weighted sum over the functions that apply; NaN where none does."""
    weights: tuple[float, ...]
    """Weight of each function."""

    @classmethod
    def of(
        cls, names: Sequence[str], each: Float[np.ndarray, "funcs P G"], weights: Sequence[float]
    ) -> "Rewards":
        """Builds the rewards from each function's own, and adds their weighted sum."""
        return cls(tuple(names), each, _weighted_sum(each, weights), tuple(weights))

    def joined(self, other: "Rewards") -> "Rewards":
        """Returns the rewards of these prompts, followed by those of the other's."""
        return dataclasses.replace(
            self,
            each=np.concatenate([self.each, other.each], axis=1),
            total=np.concatenate([self.total, other.total]),
        )

    def without(self, name: str) -> "Rewards":
        """Returns the rewards as if there were no function of that name."""
        others = [i for i, own in enumerate(self.names) if own != name]
        weights = tuple(self.weights[i] for i in others)
        each = self.each[others]
        names = tuple(self.names[i] for i in others)
        return Rewards.of(names, each, weights)

    def of_prompts(self, indices: Int[np.ndarray, " Q"]) -> "Rewards":
        """Returns the rewards of only those prompts, in that order."""
        return dataclasses.replace(self, each=self.each[:, indices], total=self.total[indices])


class RewardRunner:
    """Runner that calls every reward function on a batch and combines their rewards."""

    def __init__(
        self,
        funcs: Mapping[str, RewardFunc],
        weights: Sequence[float] | None = None,
        penalty: str | None = None,
    ):
        """**Arguments:** the functions by the name they are logged under; their weights, by
        default 1 each; the name of the function that is a penalty, which applies only where another
        function does. Raises `UserError` where functions and weights do not match, or all weights
        are 0.
        """
        weights = (1.0,) * len(funcs) if weights is None else weights
        if not funcs or len(weights) != len(funcs):
            raise UserError(
                f"{len(funcs)} reward functions and {len(weights)} reward_weights: give at least "
                f"one function, and one weight for each."
            )
        self.funcs = dict(funcs)
        if not any(weights):
            raise UserError("all reward_weights are 0: give at least one function a weight.")
        self.weights = tuple(float(weight) for weight in weights)
        self.penalty = penalty

    def with_penalty(self, name: str, func: RewardFunc) -> "RewardRunner":
        """Returns a runner with a penalty, of weight 1, on completions that have a reward."""
        return RewardRunner({**self.funcs, name: func}, (*self.weights, 1.0), name)

    def __call__(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[Sequence[str]],
        completion_ids: Sequence[Sequence[Sequence[int]]],
    ) -> Rewards:
        """Computes the rewards of `completions[p][g]`, the completions of `prompts[p]`.

        Their tokens are `completion_ids[p][g]`. Raises `RewardError`, naming the function, where it
        returns anything but one finite number or `None` for each completion, or raises that error
        itself. Its other exceptions pass through.
        """
        group = len(completions[0])
        rows = [prompt for prompt in prompts for _ in range(group)]
        texts = [text for of_prompt in completions for text in of_prompt]
        columns: dict[str, list[Any]] = {
            "completion_ids": [ids for of_prompt in completion_ids for ids in of_prompt]
        }
        columns |= {name: [row.columns[name] for row in rows] for name in rows[0].columns}
        each = np.stack(
            [_call(name, func, rows, texts, columns) for name, func in self.funcs.items()]
        )
        penalties = np.array([name == self.penalty for name in self.funcs])
        unrewarded = np.isnan(each[~penalties]).all(axis=0)
        each[np.ix_(penalties, unrewarded)] = np.nan
        each = each.reshape(-1, len(prompts), group)
        return Rewards.of(tuple(self.funcs), each, self.weights)


def _weighted_sum(
    each: Float[np.ndarray, "funcs P G"], weights: Sequence[float]
) -> Float[np.ndarray, "P G"]:
    """Sums the weighted rewards of the functions that apply; NaN where none does."""
    weighted = np.nansum(np.reshape(weights, (-1, 1, 1)) * each, axis=0)
    return np.where(np.isnan(each).all(axis=0), np.nan, weighted)


def func_name(func: RewardFunc) -> str:
    """Returns the name that a function's rewards are logged under."""
    return getattr(func, "__name__", type(func).__name__)


def _call(
    name: str,
    func: RewardFunc,
    rows: Sequence[Prompt],
    texts: list[str],
    columns: Mapping[str, list[Any]],
) -> Float[np.ndarray, " PG"]:
    try:
        returned: Any = func(prompts=[row.text for row in rows], completions=texts, **columns)
    except RewardError as error:
        raise RewardError(f"reward function {name}: {error}") from error
    count = len(returned) if isinstance(returned, (Sequence, np.ndarray)) else None
    if count != len(texts):
        got = repr(returned) if count is None else f"{count} values"
        raise RewardError(
            f"reward function {name} returned {got} for {len(texts)} completions: return a list "
            f"with one float (or None) for each."
        )
    rewards = np.empty(len(texts))
    for i, reward in enumerate(returned):
        try:
            rewards[i] = np.nan if reward is None else float(reward)
        except (TypeError, ValueError) as error:
            raise RewardError(
                f"reward function {name} returned {reward!r} for completion {i}: return a float, "
                f"or None where it does not apply."
            ) from error
        if reward is not None and not np.isfinite(rewards[i]):
            raise RewardError(
                f"reward function {name} returned {reward!r} for completion {i}: return a finite "
                f"number, or None where it does not apply."
            )
    return rewards
