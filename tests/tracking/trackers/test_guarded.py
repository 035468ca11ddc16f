"""A tracker that fails, and the run that goes on."""

from collections.abc import Mapping
from typing import Any

import pytest

from grpo_eqx.tracking import Tracker
from grpo_eqx.tracking.trackers import GuardedTracker


class Faulty(Tracker):
    """Raises an error at every call while it is broken."""

    def __init__(self, error: BaseException) -> None:
        self.error: BaseException | None = error
        self.got: list[Any] = []

    def _take(self, what: Any) -> None:
        if self.error is not None:
            raise self.error
        self.got.append(what)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._take((step, metrics))

    def completions(self, step: int, table: Mapping[str, Any]) -> None:
        self._take((step, table))

    def finish(self) -> None:
        self._take("finish")


def test_one_that_fails_at_every_call_is_named_once() -> None:
    warnings: list[str] = []
    guarded = GuardedTracker(Faulty(ConnectionError("no route to host\nat all")), warnings.append)
    guarded.log(3, {})
    guarded.completions(3, {})
    guarded.log(4, {})
    guarded.finish()
    assert warnings == [
        "tracker Faulty failed at step 3 (ConnectionError: no route to host): the run goes on, and "
        "metrics.jsonl has what it misses."
    ]


def test_one_that_fails_at_the_end_only_is_named_too() -> None:
    warnings: list[str] = []
    GuardedTracker(Faulty(OSError("full")), warnings.append).finish()
    assert warnings[0].startswith("tracker Faulty failed when the run ended (OSError: full)")


def test_one_that_works_again_gets_the_next_step() -> None:
    tracker, warnings = Faulty(OSError("full")), list[str]()
    guarded = GuardedTracker(tracker, warnings.append)
    guarded.log(1, {"reward": 0.1})
    tracker.error = None
    guarded.log(2, {"reward": 0.2})
    guarded.finish()
    assert tracker.got == [(2, {"reward": 0.2}), "finish"]
    assert len(warnings) == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
def test_what_ends_a_process_is_no_failure_of_a_tracker(error: BaseException) -> None:
    warnings: list[str] = []
    guarded = GuardedTracker(Faulty(error), warnings.append)
    for call in (lambda: guarded.log(1, {}), lambda: guarded.completions(1, {}), guarded.finish):
        with pytest.raises(type(error)):
            call()
    assert warnings == []


def test_a_tracker_need_not_show_completions() -> None:
    class Plain(Tracker):
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            pass

        def finish(self) -> None:
            pass

    warnings: list[str] = []
    GuardedTracker(Plain(), warnings.append).completions(1, {"prompt": []})
    assert warnings == []
