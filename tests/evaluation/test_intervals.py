"""Intervals of an evaluation's figures: against published values, and by how often they hold."""

import math

import numpy as np
import pytest

from grpo_eqx.evaluation.intervals import mean_of, mean_share_of, share_of


def solved(right: int, problems: int) -> np.ndarray:
    return np.arange(problems) < right


@pytest.mark.parametrize(
    ("right", "problems", "low", "high"),
    [
        # Newcombe, "Two-sided confidence intervals for the single proportion", Statistics in
        # Medicine 17 (1998), table I, method 3 (score).
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_a_share_has_wilsons_interval(right: int, problems: int, low: float, high: float) -> None:
    estimate = share_of(solved(right, problems))
    assert estimate.value == right / problems
    assert (estimate.low, estimate.high) == pytest.approx((low, high), abs=5e-5)


def test_of_all_or_none_the_interval_is_not_empty() -> None:
    assert share_of(solved(50, 50)).high == 1
    assert share_of(solved(50, 50)).low < 0.93


def test_a_mean_has_the_normal_interval_over_problems() -> None:
    values = np.array([0.25, 0.5, 1.0, 0.25, np.nan])
    estimate = mean_of(values)
    half = 1.959964 * math.sqrt(sum((x - 0.5) ** 2 for x in (0.25, 0.5, 1.0, 0.25)) / 3 / 4)
    assert estimate == pytest.approx((0.5, 0.5 - half, 0.5 + half), rel=1e-6)


def test_too_few_values_have_no_interval() -> None:
    assert mean_of(np.array([0.5, np.nan]))[0] == 0.5
    assert np.isnan(mean_of(np.array([0.5, np.nan]))[1:]).all()
    assert np.isnan(mean_of(np.array([np.nan]))).all()


def test_shares_near_0_and_1_have_intervals_within_0_and_1() -> None:
    """Of 64 problems with four completions each, as those that decide problems alone have them."""
    none, one = np.zeros(64), np.where(np.arange(64) == 0, 0.25, 0.0)
    assert mean_share_of(none, 4) == share_of(solved(0, 64))
    assert (mean_share_of(none, 4).low, mean_share_of(none + 1, 4).high) == (0.0, 1.0)
    assert mean_share_of(none + 1, 4) == share_of(solved(64, 64))
    assert mean_share_of(one, 4) == pytest.approx(share_of(solved(1, 256)), abs=1e-4)
    # Problems that are always or never solved: their completions count once.
    assert mean_share_of(solved(16, 64).astype(float), 4) == pytest.approx(
        share_of(solved(16, 64)), abs=2e-3
    )
    assert mean_share_of(np.array([0.25]), 4).high < 1  # a single problem


@pytest.mark.parametrize("rate", [0.02, 0.5, 0.9])
def test_intervals_hold_about_as_often_as_they_say(rate: float) -> None:
    """Over draws of 200 problems: with one completion each, and with four of mixed difficulty."""
    draws = np.random.default_rng(0)
    held = {"share": 0, "mean share": 0, "mean": 0}
    for _ in range(1000):
        share = share_of(draws.random(200) < rate)
        held["share"] += share.low <= rate <= share.high
        difficulty = draws.beta(2 * rate, 2 * (1 - rate), 200)
        four = draws.binomial(4, difficulty) / 4
        for name, estimate in (("mean share", mean_share_of(four, 4)), ("mean", mean_of(four))):
            held[name] += estimate.low <= rate <= estimate.high
    if rate < 0.1:
        assert held.pop("mean") < 930  # which is why shares have another
    assert all(0.91 < count / 1000 < 0.975 for count in held.values()), held
