"""Advantages of completions, from the rewards of the whole step."""

import warnings
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float

from grpo_eqx.common.choices import (
    AdvantageEstimator,
    MultiObjectiveAggregation,
    ScaleRewards,
)

_EPSILON = 1e-4  # as in TRL: keeps advantages of nearly equal rewards from blowing up
_ROUNDING = 1e-12

Grouped = Float[np.ndarray, "*funcs P G"]


def compute_advantages(
    total: Float[np.ndarray, "P G"],
    each: Float[np.ndarray, "funcs P G"],
    weights: Sequence[float],
    *,
    estimator: AdvantageEstimator = "grpo",
    scale_rewards: ScaleRewards = "group",
    aggregation: MultiObjectiveAggregation = "sum_then_normalize",
) -> Float[np.ndarray, "P G"]:
    """Computes advantages from the rewards of all prompts of the step, on all hosts.

    **Arguments:**

    - `total`: reward R of every completion, the weighted sum over the reward functions.
    - `each`, `weights`: rewards of every function, and the weights of the functions.

    Missing rewards are NaN. Means and standard deviations (ddof 1, plus 1e-4) skip them.

    - `grpo`: R minus the group's mean, divided by the deviation of the group (arXiv 2402.03300,
      4.1.2), of the batch, or by nothing (Dr. GRPO, arXiv 2503.20783), as `scale_rewards` selects.
    - `rloo`: R minus the mean of the group's *other* completions (arXiv 2402.14740, eq. 8).
    - `reinforce`: R itself.
    - `reinforce_plus_plus`: R minus the batch's mean, divided by the batch's deviation
      (arXiv 2501.03262). Whitened over completions, each counting once, whatever its length.
    - `reinforce_plus_plus_baseline`: the same, applied to R minus its group's mean.

    `normalize_then_sum` applies to `grpo`: each function's own rewards are normalized in their
    group, and their weighted sum in the batch (GDPO, arXiv 2601.05242).

    **Returns:** float32 advantages; 0 for missing rewards, and exactly 0 wherever a baseline
    cancels equal rewards.
    """
    total = total.astype(np.float64)
    with warnings.catch_warnings():
        # A group or batch with fewer than two rewards has no deviation, and NaN becomes 0 below.
        warnings.simplefilter("ignore", RuntimeWarning)
        if estimator == "reinforce":
            advantages = total
        elif estimator == "rloo":
            advantages = _leave_one_out(total)
        elif estimator == "reinforce_plus_plus":
            advantages = _whitened(total)
        elif estimator == "reinforce_plus_plus_baseline":
            advantages = _centered(total)
            advantages /= _deviation(advantages, axis=None)
        elif aggregation == "normalize_then_sum":
            advantages = _normalized_then_summed(total, each, weights)
        else:
            advantages = _centered(total)
            if scale_rewards == "group":
                advantages /= _deviation(total, axis=-1)
            elif scale_rewards == "batch":
                advantages /= _deviation(total, axis=None)
    return np.nan_to_num(advantages, nan=0.0).astype(np.float32)


def informative_groups(
    total: Float[np.ndarray, "P G"],
    each: Float[np.ndarray, "funcs P G"],
    weights: Sequence[float],
    aggregation: MultiObjectiveAggregation = "sum_then_normalize",
) -> Bool[np.ndarray, " P"]:
    """Returns True for groups whose rewards differ; the others do not tell which sample is better.

    Compares the weighted sums of the rewards or, where these are summed after normalizing, the
    rewards of every function with a nonzero weight, of which one must differ. DAPO samples until
    a batch has no others (arXiv 2503.14476, section 3.2).

    **Arguments:** as in `compute_advantages`.
    """
    if aggregation == "normalize_then_sum":
        weighted = each[np.asarray(weights) != 0]
        return np.logical_not(all_equal(weighted, axis=-1)[..., 0].all(axis=0))
    return np.logical_not(all_equal(total, axis=-1)[..., 0])


def all_equal(rewards: Float[np.ndarray, "..."], axis: int | None) -> Bool[np.ndarray, "..."]:
    """Returns whether rewards along `axis`, which is kept, are equal up to rounding, or missing."""
    highest = np.fmax.reduce(rewards, axis=axis, keepdims=True)
    lowest = np.fmin.reduce(rewards, axis=axis, keepdims=True)
    # A weighted sum of the same parts can round differently in another order.
    size = np.maximum(np.abs(highest), np.abs(lowest))
    return np.isnan(highest) | (highest - lowest <= _ROUNDING * size)


def _centered(rewards: Grouped) -> Grouped:
    """Subtracts the group's mean."""
    # Rounding of the mean must not give a group of equal rewards a direction.
    centered = rewards - np.nanmean(rewards, axis=-1, keepdims=True)
    return np.where(all_equal(rewards, axis=-1) & ~np.isnan(rewards), 0.0, centered)


def _leave_one_out(rewards: Grouped) -> Grouped:
    """Returns R_i - mean of R_j, j != i: n / (n - 1) times (R_i - mean of all n)."""
    count = (~np.isnan(rewards)).sum(axis=-1, keepdims=True)
    return _centered(rewards) * count / np.maximum(count - 1, 1)


def _whitened(rewards: Grouped) -> Grouped:
    """Subtracts the batch's mean and divides by the batch's deviation."""
    if all_equal(rewards, axis=None).all():
        return np.where(np.isnan(rewards), np.nan, 0.0)
    return (rewards - np.nanmean(rewards)) / _deviation(rewards, axis=None)


def _normalized_then_summed(
    total: Float[np.ndarray, "P G"],
    each: Float[np.ndarray, "funcs P G"],
    weights: Sequence[float],
) -> Float[np.ndarray, "P G"]:
    normalized = _centered(each) / _deviation(each, axis=-1)
    summed = np.nansum(np.asarray(weights)[:, None, None] * normalized, axis=0)
    summed = np.where(np.isnan(total), np.nan, summed)
    return summed / _deviation(summed, axis=None)  # its mean is already 0


def _deviation(rewards: Grouped, axis: int | None) -> Float[np.ndarray, "..."]:
    return np.nanstd(rewards, axis=axis, keepdims=True, ddof=1) + _EPSILON
