"""The part of a run's time that an extra may take."""

import pytest

from grpo_eqx.tracking import time_share
from grpo_eqx.tracking.time_share import TimeShare


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [50.0]
    monkeypatch.setattr(time_share.time, "monotonic", lambda: now[0])
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
