"""Advantages against the formula, and what they must not depend on."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from grpo_eqx.objective import group_advantages

REWARDS = np.array([[1.0, 0.0, 0.0, 1.0], [3.0, 1.0, 1.0, 1.0]])
batches = arrays(np.float64, (3, 4), elements=st.integers(-5, 5).map(float))


def test_group_scaling_by_hand() -> None:
    # mean 1/2, deviations 1/2 each: std (ddof 1) is sqrt(4 * 1/4 / 3)
    first = np.array([0.5, -0.5, -0.5, 0.5]) / (np.sqrt(1 / 3) + 1e-4)
    second = np.array([1.5, -0.5, -0.5, -0.5]) / (1 + 1e-4)
    np.testing.assert_allclose(group_advantages(REWARDS), [first, second], rtol=1e-6)


def test_batch_scaling_divides_every_group_by_one_deviation() -> None:
    centred = REWARDS - REWARDS.mean(axis=1, keepdims=True)
    expected = centred / (REWARDS.std(ddof=1) + 1e-4)
    np.testing.assert_allclose(group_advantages(REWARDS, "batch"), expected, rtol=1e-6)


def test_no_scaling_only_centres() -> None:
    np.testing.assert_allclose(
        group_advantages(REWARDS, "none"), [[0.5, -0.5, -0.5, 0.5], [1.5, -0.5, -0.5, -0.5]]
    )


@given(batches, st.integers(-100, 100))
def test_a_constant_added_to_a_group_changes_nothing(rewards: np.ndarray, shift: int) -> None:
    moved = rewards + np.array([[shift], [0], [-shift]])
    for scale in ("group", "none"):
        np.testing.assert_allclose(
            group_advantages(moved, scale), group_advantages(rewards, scale), atol=1e-5
        )


@given(batches, st.permutations(range(3)), st.permutations(range(4)))
def test_order_of_prompts_and_samples_does_not_matter(
    rewards: np.ndarray, prompts: list[int], samples: list[int]
) -> None:
    for scale in ("group", "batch", "none"):
        shuffled = group_advantages(rewards[prompts][:, samples], scale)
        expected = group_advantages(rewards, scale)[prompts][:, samples]
        np.testing.assert_allclose(shuffled, expected, atol=1e-6)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equal_rewards_give_exact_zeros(scale: str) -> None:
    assert (group_advantages(np.full((2, 4), 0.3), scale) == 0).all()


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_missing_rewards_get_zero_and_leave_the_baseline_alone(scale: str) -> None:
    rewards = np.array([[1.0, np.nan, 0.0, np.nan], [np.nan] * 4, [2.0, np.nan, np.nan, np.nan]])
    advantages = group_advantages(rewards, scale)
    assert np.isfinite(advantages).all()
    assert (advantages[np.isnan(rewards)] == 0).all()
    assert advantages[0, 0] == -advantages[0, 2] > 0
    assert (advantages[2] == 0).all()
