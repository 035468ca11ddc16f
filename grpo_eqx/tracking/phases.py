"""Work in progress that takes a while, which a live display shows beside metrics."""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator

from grpo_eqx.tracking.durations import readable_seconds


@dataclasses.dataclass(eq=False)
class Phase:
    """One piece of work, described in words, and when it began."""

    text: str
    before: float | None = None
    """Seconds that the same work took before, if known."""
    total: int = 0
    """Number of parts of the work; 0 if they are not counted."""
    done: int = 0
    began: float = dataclasses.field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def __str__(self) -> str:
        """Says what is done, how far it is, how long it has taken, and how long it took before."""
        far = f" {self.done} of {self.total}" if self.total else ""
        before = "" if self.before is None else f"; took {readable_seconds(self.before)} before"
        return f"{self.text}{far}, {readable_seconds(self.seconds)}{before}"


class Phases:
    """The phases in progress in this process, of all its threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._current: list[Phase] = []
        self._displays = 0

    @property
    def are_shown(self) -> bool:
        """Whether a live display shows the phases, so that nothing else need be printed."""
        return self._displays > 0

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Marks the phases as shown by a live display while the context is entered."""
        self._displays += 1
        try:
            yield
        finally:
            self._displays -= 1

    @property
    def latest(self) -> Phase | None:
        """The phase in progress that began last."""
        with self._lock:
            return self._current[-1] if self._current else None

    def begin(self, phase: Phase) -> None:
        with self._lock:
            self._current.append(phase)

    def end(self, phase: Phase) -> None:
        """Ends a phase. A second call does nothing."""
        with self._lock:
            self._current = [each for each in self._current if each is not phase]

    @contextlib.contextmanager
    def lasting(self, phase: Phase) -> Iterator[Phase]:
        """Keeps a phase in progress while the context is entered."""
        self.begin(phase)
        try:
            yield phase
        finally:
            self.end(phase)


PHASES = Phases()
"""The phases of this process. There is one list, because a process has one terminal."""
