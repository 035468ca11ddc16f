"""The course of a metric in one line, and its direction."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_eqx.tracking.trend import direction, sparkline

NAN = float("nan")


@pytest.mark.parametrize(
    ("values", "drawn"),
    [
        ([0.0, 0.5, 1.0], "▁▅█"),
        ([0.0, NAN, 1.0], "▁ █"),
        ([2.0, 2.0], "▅▅"),
        ([NAN, NAN], "  "),
        ([], ""),
        ([0.0, 1.0, float("inf")], "▁█ "),
    ],
)
def test_the_lowest_is_low_and_the_highest_high(values: list[float], drawn: str) -> None:
    assert sparkline(values, 10) == drawn


def test_more_values_than_characters_are_drawn_by_their_means() -> None:
    assert sparkline([0.0, 2.0, 5.0, 7.0, 10.0, 12.0], 3) == "▁▅█"
    assert sparkline([0.0, NAN, 7.0, 7.0], 2) == "▁█"


@given(st.lists(st.floats()), st.integers(0, 100))
def test_any_values_have_room_and_are_encodable(values: list[float], width: int) -> None:
    assert len(sparkline(values, width)) <= max(1, width)
    assert sparkline(values, width, ascii_only=True).isascii()


def test_a_trend_is_told_from_noise() -> None:
    noise = np.random.default_rng(0).normal(size=(200, 20))
    rise = np.linspace(0, 6, 20)
    told = [direction(row.tolist()) for row in noise]
    assert sum(each != 0 for each in told) < 0.12 * len(told)
    assert np.mean([direction((row + rise).tolist()) == 1 for row in noise]) > 0.95
    assert np.mean([direction((row - rise).tolist()) == -1 for row in noise]) > 0.95


def test_too_few_values_have_no_direction() -> None:
    assert direction([0.0, 1.0, 2.0, NAN, 3.0, 4.0]) is None
    assert direction([0.5] * 6) == 0
