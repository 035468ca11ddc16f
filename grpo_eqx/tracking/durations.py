"""Durations: in words, what is left of a run, and what an extra may take of it."""

import contextlib
import statistics
import time
from collections import deque
from collections.abc import Iterator

_STEPS_OF_ESTIMATE = 20
"""Latest steps that compiled nothing; their median is the estimate for each remaining step."""


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
        """Returns the seconds that `num_steps` steps take, or `None` before the first estimate."""
        return statistics.median(self._seconds) * num_steps if self._seconds else None


class TimeShare:
    """Pace of optional work, such as a plot, which may take a given share of a run's time.

    Work that took a second, with a share of 0.001, is due again after 1,000 seconds.
    """

    def __init__(self, share: float, *, first_after_s: float = 0.0):
        """**Arguments:**

        - `share`: the share of the run's time that the work may take.
        - `first_after_s`: seconds until the work is due for the first time.
        """
        self._share = share
        self._due = time.monotonic() + first_after_s

    def is_due(self) -> bool:
        """Returns whether the work may be done now."""
        return time.monotonic() >= self._due

    @contextlib.contextmanager
    def spent(self) -> Iterator[None]:
        """Times the block that does the work, also where the block raises an error."""
        started = time.monotonic()
        try:
            yield
        finally:
            ended = time.monotonic()
            self._due = ended + (ended - started) / self._share
