"""Advantages of completions, from the rewards of the whole step."""

import warnings

import numpy as np
from jaxtyping import Bool, Float

from grpo_eqx._types import AdvantageEstimator, MultiObjectiveAggregation, ScaleRewards
from grpo_eqx.rewards.runner import Rewards, all_equal

_EPSILON = 1e-4  # as in TRL: keeps almost equal rewards from blowing up

Grouped = Float[np.ndarray, "*funcs P G"]


def compute_advantages(
    rewards: Rewards,
    *,
    estimator: AdvantageEstimator = "grpo",
    scale_rewards: ScaleRewards = "group",
    aggregation: MultiObjectiveAggregation = "sum_then_normalize",
) -> Float[np.ndarray, "P G"]:
    """Advantages from the rewards of all prompts of the step, on all hosts.

    With R the reward, means and standard deviations (ddof 1, plus 1e-4) over what is not missing:

    - `grpo`: R less the group's mean, over the deviation of the group (arXiv 2402.03300, 4.1.2), of
      the batch, or over nothing (Dr. GRPO, arXiv 2503.20783), as `scale_rewards` says.
    - `rloo`: R less the mean of the group's *other* completions (arXiv 2402.14740, eq. 8).
    - `reinforce`: R itself.
    - `reinforce_plus_plus`: R less the batch's mean, over the batch's deviation
      (arXiv 2501.03262). Whitened over completions, each counting once, whatever its length.
    - `reinforce_plus_plus_baseline`: the same of R less its group's mean.

    `normalize_then_sum` applies to `grpo`: every function's own rewards are normalised in their
    group, their weighted sum in the batch (GDPO, arXiv 2601.05242).

    **Returns:** float32 advantages; 0 for missing rewards, and exactly 0 for equal rewards wherever
    a baseline makes them so.
    """
    total = rewards.total.astype(np.float64)
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
            advantages = _centred(total)
            advantages /= _deviation(advantages, axis=None)
        elif aggregation == "normalize_then_sum":
            advantages = _normalised_then_summed(rewards)
        else:
            advantages = _centred(total)
            if scale_rewards == "group":
                advantages /= _deviation(total, axis=-1)
            elif scale_rewards == "batch":
                advantages /= _deviation(total, axis=None)
    return np.nan_to_num(advantages, nan=0.0).astype(np.float32)


def informative_groups(
    rewards: Rewards, aggregation: MultiObjectiveAggregation = "sum_then_normalize"
) -> Bool[np.ndarray, " P"]:
    """True for groups whose rewards differ: the others say nothing about which sample is better.

    The weighted sums of the rewards or, where they are summed after normalising, those of any
    function with a weight.
    """
    if aggregation == "normalize_then_sum":
        each = rewards.each[np.asarray(rewards.weights) != 0]
        return np.logical_not(all_equal(each, axis=-1)[..., 0].all(axis=0))
    return np.logical_not(all_equal(rewards.total, axis=-1)[..., 0])


def _centred(rewards: Grouped) -> Grouped:
    """Less the group's mean."""
    # Rounding of the mean must not give a group of equal rewards a direction.
    centred = rewards - np.nanmean(rewards, axis=-1, keepdims=True)
    return np.where(all_equal(rewards, axis=-1) & ~np.isnan(rewards), 0.0, centred)


def _leave_one_out(rewards: Grouped) -> Grouped:
    """R_i - mean of R_j, j != i, which is n / (n - 1) times R_i less the mean of all n."""
    count = (~np.isnan(rewards)).sum(axis=-1, keepdims=True)
    return _centred(rewards) * count / np.maximum(count - 1, 1)


def _whitened(rewards: Grouped) -> Grouped:
    """Less the batch's mean, over the batch's deviation."""
    if all_equal(rewards, axis=None).all():
        return np.where(np.isnan(rewards), np.nan, 0.0)
    return (rewards - np.nanmean(rewards)) / _deviation(rewards, axis=None)


def _normalised_then_summed(rewards: Rewards) -> Grouped:
    each = _centred(rewards.each) / _deviation(rewards.each, axis=-1)
    summed = np.nansum(np.asarray(rewards.weights)[:, None, None] * each, axis=0)
    summed = np.where(np.isnan(rewards.total), np.nan, summed)
    return summed / _deviation(summed, axis=None)  # its mean is 0 as it is


def _deviation(rewards: Grouped, axis: int | None) -> Float[np.ndarray, "..."]:
    return np.nanstd(rewards, axis=axis, keepdims=True, ddof=1) + _EPSILON
