"""Durations in words, and the time that is left."""

import pytest

from grpo_eqx.tracking import durations
from grpo_eqx.tracking.durations import TimeLeft, TimeShare, readable_seconds


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


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [50.0]
    monkeypatch.setattr(durations.time, "monotonic", lambda: now[0])
    return now


def test_what_took_a_second_waits_until_that_is_its_share(clock: list[float]) -> None:
    pace = TimeShare(0.01)
    assert pace.is_due()
    with pace.spent():
        clock[0] += 1.0
    clock[0] += 99.0
    assert not pace.is_due()
    clock[0] += 1.0
    assert pace.is_due()


def test_the_first_can_come_later(clock: list[float]) -> None:
    pace = TimeShare(0.01, first_after_s=300.0)
    assert not pace.is_due()
    clock[0] += 300.0
    assert pace.is_due()


def test_an_attempt_that_fails_takes_time_too(clock: list[float]) -> None:
    pace = TimeShare(0.5)

    def fail() -> None:
        with pace.spent():
            clock[0] += 10.0
            raise ValueError("no space")

    with pytest.raises(ValueError, match="no space"):
        fail()
    assert not pace.is_due()
