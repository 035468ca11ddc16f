"""Limit on what part of a run's time an extra may take."""

import contextlib
import time
from collections.abc import Iterator


class TimeShare:
    """Pace of something that a run can do less often: it is due once its last time has paid off.

    Where it took a second and its share is 0.001, it is due again after 1,000 seconds.
    """

    def __init__(self, share: float, *, first_after_s: float = 0.0):
        """**Arguments:** the part of the time that it may take; when it is due first."""
        self._share = share
        self._due = time.monotonic() + first_after_s

    def is_due(self) -> bool:
        """Returns whether it may be done now."""
        return time.monotonic() >= self._due

    @contextlib.contextmanager
    def spent(self) -> Iterator[None]:
        """Times the block in which it is done, whether that raises an error or not."""
        started = time.monotonic()
        try:
            yield
        finally:
            ended = time.monotonic()
            self._due = ended + (ended - started) / self._share
