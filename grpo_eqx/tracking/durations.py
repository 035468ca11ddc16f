"""Durations in words, and the time that is left."""

import statistics
from collections import deque

_STEPS_OF_ESTIMATE = 20
"""Latest steps, of those that compiled nothing, by whose median the time left is estimated."""


def readable_seconds(seconds: float) -> str:
    """Returns a duration as people say it: 45 s, 12 min, 3 h 5 min."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


class TimeLeft:
    """Estimate of the time that a run's remaining steps take."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_STEPS_OF_ESTIMATE)

    def add(self, seconds: float, *, compiled: bool) -> None:
        """Notes a step's seconds; one that compiled says nothing about the steps to come."""
        if not compiled:
            self._seconds.append(seconds)

    def of(self, num_steps: int) -> float | None:
        """Returns the seconds that so many steps take, or `None` where nothing is known yet."""
        return statistics.median(self._seconds) * num_steps if self._seconds else None
