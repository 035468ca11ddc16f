"""Durations in words, and the time that is left."""

import pytest

from grpo_eqx.tracking.durations import TimeLeft, readable_seconds


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 s"), (89.0, "89 s"), (90.0, "2 min"), (3600.0, "60 min"), (11100.0, "3 h 5 min")],
)
def test_durations_are_as_people_say_them(seconds: float, text: str) -> None:
    assert readable_seconds(seconds) == text


def test_steps_that_compile_say_nothing_about_those_to_come() -> None:
    left = TimeLeft()
    left.add(100.0, compiled=True)
    assert left.of(10) is None
    for seconds in (2.0, 2.0, 50.0):
        left.add(seconds, compiled=False)
    assert left.of(10) == 20.0
