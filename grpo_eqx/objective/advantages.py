"""Advantages of completions relative to their group."""

import warnings
from typing import Literal

import numpy as np
from jaxtyping import Float

ScaleRewards = Literal["group", "batch", "none"]

_EPSILON = 1e-4  # as in TRL: keeps groups with almost equal rewards from blowing up


def group_advantages(
    rewards: Float[np.ndarray, "P G"], scale_rewards: ScaleRewards = "group"
) -> Float[np.ndarray, "P G"]:
    """Rewards minus their group's mean, over a standard deviation (GRPO, arXiv 2402.03300, eq. 3).

    **Arguments:** `rewards` of all prompts of the step; NaN marks a completion that no reward
    function applied to. `scale_rewards` divides by the standard deviation (ddof 1) of the group,
    of the whole batch, or by nothing (Dr. GRPO, arXiv 2503.20783).

    **Returns:** float32 advantages; 0 for missing rewards and for groups with equal ones.
    """
    rewards = rewards.astype(np.float64)
    with warnings.catch_warnings():
        # A group or batch with fewer than two rewards has no deviation, and NaN becomes 0 below.
        warnings.simplefilter("ignore", RuntimeWarning)
        advantages = rewards - np.nanmean(rewards, axis=1, keepdims=True)
        if scale_rewards == "group":
            advantages /= np.nanstd(rewards, axis=1, keepdims=True, ddof=1) + _EPSILON
        elif scale_rewards == "batch":
            advantages /= np.nanstd(rewards, ddof=1) + _EPSILON
        # Rounding of the mean must not give a group of equal rewards a direction.
        equal = np.nanmax(rewards, axis=1) == np.nanmin(rewards, axis=1)
    advantages[equal] = 0.0
    return np.nan_to_num(advantages, nan=0.0).astype(np.float32)
