"""A tracker that cannot end a run."""

from collections.abc import Callable, Mapping

from grpo_eqx.common.errors import first_line
from grpo_eqx.tracking.trackers.base import CompletionsTable, Tracker


class GuardedTracker(Tracker):
    """Tracker that passes all on to another, whose errors it says once and otherwise ignores.

    The other is called again at every step: networks come back, and disks are emptied. Exceptions
    that are no errors, such as `KeyboardInterrupt`, pass.
    """

    def __init__(self, tracker: Tracker, warn: Callable[[str], None]):
        """**Arguments:** the tracker; called with what to tell the user."""
        self._tracker = tracker
        self._warn = warn
        self._failed = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._attempt(f"at step {step}", lambda: self._tracker.log(step, metrics))

    def completions(self, step: int, table: CompletionsTable) -> None:
        self._attempt(f"at step {step}", lambda: self._tracker.completions(step, table))

    def finish(self) -> None:
        self._attempt("when the run ended", self._tracker.finish)

    def _attempt(self, when: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # a tracker's errors are of any class
            if self._failed:
                return
            self._failed = True
            self._warn(
                f"tracker {type(self._tracker).__name__} failed {when} ({failure(error)}): the run "
                f"goes on, and metrics.jsonl has what it misses."
            )


def failure(error: Exception) -> str:
    """Describes an error in a line."""
    return f"{type(error).__name__}: {first_line(error)}"
