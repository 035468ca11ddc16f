"""Advantages against the formulas, and what they must not depend on."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from grpo_eqx.objective import compute_advantages, informative_groups

NAN = float("nan")
FIRST = [[1.0, 0.0, 0.0, 1.0], [3.0, 1.0, 1.0, 1.0]]
SECOND = [[0.0, 0.0, 2.0, 2.0], [5.0, 5.0, 5.0, 5.0]]
WEIGHTS = (1.0, 0.5)

VARIANTS: dict[str, dict[str, Any]] = {
    "grpo by group": {"estimator": "grpo", "scale_rewards": "group"},
    "grpo by batch": {"estimator": "grpo", "scale_rewards": "batch"},
    "grpo unscaled": {"estimator": "grpo", "scale_rewards": "none"},
    "rloo": {"estimator": "rloo"},
    "reinforce": {"estimator": "reinforce"},
    "reinforce++": {"estimator": "reinforce_plus_plus"},
    "reinforce++ baseline": {"estimator": "reinforce_plus_plus_baseline"},
    "gdpo": {"aggregation": "normalize_then_sum"},
}
WITH_BASELINE = [name for name in VARIANTS if name != "reinforce"]
WITH_GROUP_BASELINE = [name for name in WITH_BASELINE if name != "reinforce++"]

few = st.integers(-5, 5).map(float)
batches = arrays(np.float64, (2, 3, 4), elements=few)  # functions, prompts, samples


def rewards_of(
    each: Any, weights: tuple[float, ...] = WEIGHTS
) -> tuple[np.ndarray, np.ndarray, tuple[float, ...]]:
    """The weighted sums over the functions that apply, with what they are sums of."""
    each = np.asarray(each, np.float64)
    weights = weights[: len(each)]
    total = np.nansum(np.asarray(weights)[:, None, None] * each, axis=0)
    total[np.isnan(each).all(axis=0)] = np.nan
    return total, each, weights


def advantages(each: Any, variant: str) -> np.ndarray:
    return compute_advantages(*rewards_of(each), **VARIANTS[variant])


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        # The groups' means are 1/2 and 3/2, their squared distances from them add up to 1 and 3.
        (
            "grpo by group",
            [
                np.array([0.5, -0.5, -0.5, 0.5]) / (np.sqrt(1 / 3) + 1e-4),
                np.array([1.5, -0.5, -0.5, -0.5]) / (np.sqrt(3 / 3) + 1e-4),
            ],
        ),
        # The batch's mean is 1, the squared distances from it add up to 6.
        (
            "grpo by batch",
            np.array([[0.5, -0.5, -0.5, 0.5], [1.5, -0.5, -0.5, -0.5]]) / (np.sqrt(6 / 7) + 1e-4),
        ),
        ("grpo unscaled", [[0.5, -0.5, -0.5, 0.5], [1.5, -0.5, -0.5, -0.5]]),
        ("rloo", [[1 - 1 / 3, 0 - 2 / 3, 0 - 2 / 3, 1 - 1 / 3], [3 - 1, *[1 - 5 / 3] * 3]]),
        ("reinforce", FIRST),
        (
            "reinforce++",
            np.array([[0.0, -1.0, -1.0, 0.0], [2.0, 0.0, 0.0, 0.0]]) / (np.sqrt(6 / 7) + 1e-4),
        ),
        # The squared distances from the groups' means add up to 1 + 3.
        (
            "reinforce++ baseline",
            np.array([[0.5, -0.5, -0.5, 0.5], [1.5, -0.5, -0.5, -0.5]]) / (np.sqrt(4 / 7) + 1e-4),
        ),
    ],
)
def test_estimators_by_hand(variant: str, expected: Any) -> None:
    found = advantages([FIRST], variant)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_gdpo_normalizes_every_function_then_sums_then_whitens_by_hand() -> None:
    first = np.array([0.5, -0.5, -0.5, 0.5]) / (np.sqrt(1 / 3) + 1e-4)
    second = np.array([-1.0, -1.0, 1.0, 1.0]) / (np.sqrt(4 / 3) + 1e-4)
    lower = np.array([1.5, -0.5, -0.5, -0.5]) / (1 + 1e-4)
    summed = np.array([first + 0.5 * second, lower])  # the lower group's second rewards are equal
    expected = summed / (np.sqrt((summed**2).sum() / 7) + 1e-4)
    np.testing.assert_allclose(advantages([FIRST, SECOND], "gdpo"), expected, rtol=1e-6)


def test_the_other_estimators_sum_with_weights_first() -> None:
    summed = np.array(FIRST) + 0.5 * np.array(SECOND)
    for variant in WITH_BASELINE[:-1]:
        found = advantages([FIRST, SECOND], variant)
        np.testing.assert_array_equal(found, advantages([summed], variant))


@pytest.mark.parametrize("variant", VARIANTS)
def test_missing_rewards_get_zero_and_leave_the_others_alone(variant: str) -> None:
    """As if the samples without a reward had never been drawn."""
    each = np.array([FIRST, SECOND])
    with_missing = np.insert(each, 2, np.nan, axis=2)
    found = advantages(with_missing, variant)
    assert (found[:, 2] == 0).all()
    np.testing.assert_allclose(np.delete(found, 2, axis=1), advantages(each, variant), rtol=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_group_without_rewards_gets_zero_and_leaves_the_others_alone(variant: str) -> None:
    each = np.array([FIRST, SECOND])
    found = advantages(np.insert(each, 1, np.nan, axis=1), variant)
    assert (found[1] == 0).all()
    np.testing.assert_allclose(found[[0, 2]], advantages(each, variant), rtol=1e-6)


@pytest.mark.parametrize("variant", WITH_GROUP_BASELINE)
def test_a_single_reward_in_a_group_has_nothing_to_be_compared_with(variant: str) -> None:
    found = advantages([[[1.0, NAN, 0.0, NAN], [2.0, NAN, NAN, NAN], [NAN] * 4]], variant)
    assert found[0, 0] == -found[0, 2] > 0
    assert (found[1:] == 0).all()


def test_a_function_that_does_not_apply_contributes_nothing_to_gdpo() -> None:
    found = advantages([FIRST, [[NAN] * 4] * 2], "gdpo")
    np.testing.assert_array_equal(found, advantages([FIRST], "gdpo"))


@pytest.mark.parametrize("variant", WITH_BASELINE)
def test_equal_rewards_in_the_batch_give_exact_zeros(variant: str) -> None:
    assert (advantages(np.full((2, 2, 7), 0.3), variant) == 0).all()


@pytest.mark.parametrize("variant", WITH_GROUP_BASELINE)
def test_equal_rewards_in_a_group_give_exact_zeros_next_to_others_that_differ(variant: str) -> None:
    each = [[[0.1, 0.2, 0.4, 0.3, 0.7], [0.3] * 5, [0.3, NAN, 0.3, NAN, 0.3]]] * 2
    found = advantages(each, variant)
    assert (found[0] != 0).any()
    assert (found[1:] == 0).all()


@given(batches, arrays(np.float64, (2, 3, 1), elements=st.integers(-100, 100).map(float)))
def test_a_constant_added_to_a_group_changes_nothing(
    rewards: np.ndarray, shifts: np.ndarray
) -> None:
    """For GDPO to a group's rewards from one function; for the others to their sum."""
    for variant in ("grpo by group", "grpo unscaled", "rloo", "reinforce++ baseline", "gdpo"):
        moved = advantages(rewards + shifts, variant)
        np.testing.assert_allclose(moved, advantages(rewards, variant), rtol=1e-5, atol=1e-6)


@given(batches, st.integers(-100, 100))
def test_a_constant_added_to_the_batch_changes_nothing(rewards: np.ndarray, shift: int) -> None:
    for variant in WITH_BASELINE:
        moved = advantages(rewards + shift, variant)
        np.testing.assert_allclose(moved, advantages(rewards, variant), rtol=1e-5, atol=1e-6)


@given(
    arrays(np.float64, (2, 3, 4), elements=few | st.just(NAN)),
    st.permutations(range(3)),
    st.permutations(range(4)),
)
def test_order_of_prompts_and_samples_does_not_matter(
    rewards: np.ndarray, prompts: list[int], samples: list[int]
) -> None:
    for variant in VARIANTS:
        shuffled = advantages(rewards[:, prompts][:, :, samples], variant)
        expected = advantages(rewards, variant)[prompts][:, samples]
        np.testing.assert_allclose(shuffled, expected, rtol=1e-5, atol=1e-6)


@given(arrays(np.float64, (2, 3, 4), elements=st.just(NAN) | st.floats(-1e37, 1e37)))
def test_advantages_are_finite_whatever_the_rewards(rewards: np.ndarray) -> None:
    """Up to the size that float32 can hold."""
    for variant in VARIANTS:
        found = advantages(rewards, variant)
        assert np.isfinite(found).all()
        assert (found[np.isnan(rewards).all(axis=0)] == 0).all()


def test_groups_with_different_rewards_are_informative() -> None:
    groups = [[0.0, 1.0, 0.0], [1.0, 1.0, 1.0], [NAN, 1.0, 0.0], [NAN, 1.0, 1.0], [NAN] * 3]
    found = informative_groups(*rewards_of([groups]))
    assert found.tolist() == [True, False, True, False, False]


def test_groups_are_judged_by_what_is_normalized() -> None:
    """Sums that are equal because two functions cancel hide a difference only from the sum."""
    each = [[[0.0, 1.0], [1.0, 1.0], [0.0, 1.0]], [[2.0, 0.0], [3.0, 3.0], [4.0, 4.0]]]
    rewards = rewards_of(each, (1.0, 0.5))
    assert informative_groups(*rewards).tolist() == [False, False, True]
    assert informative_groups(*rewards, "normalize_then_sum").tolist() == [True, False, True]


@given(batches, arrays(np.bool_, (3, 4)), st.sampled_from(sorted(VARIANTS)))
def test_missing_completions_are_as_if_they_were_not_there(
    each: np.ndarray, missing: np.ndarray, variant: str
) -> None:
    """In the first group: theirs are 0, and the others' are those of a smaller group."""
    missing[1:] = False
    missing[0, 0] = False
    some = np.where(missing, NAN, each)
    found = advantages(some, variant)
    assert (found[missing] == 0).all()
    if variant in ("grpo by group", "grpo unscaled", "rloo", "reinforce"):
        smaller = advantages(each[:, :1, ~missing[0]], variant)
        np.testing.assert_allclose(found[0, ~missing[0]], smaller[0], rtol=1e-6, atol=1e-7)
    else:  # deviations of the batch: an order of the same rewards is another such batch
        order = np.argsort(missing[0], kind="stable")
        moved = some.copy()
        moved[:, 0] = some[:, 0, order]
        np.testing.assert_allclose(
            advantages(moved, variant)[0], found[0, order], rtol=1e-5, atol=1e-6
        )
