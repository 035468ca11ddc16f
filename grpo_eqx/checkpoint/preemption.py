"""Requests to end a run early: SIGTERM from a scheduler, Ctrl-C from a person."""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

from grpo_eqx.errors import EXIT_PREEMPTED


class Preempted(SystemExit):
    """Ends a process whose run was asked to stop, with `EXIT_PREEMPTED`, after a checkpoint."""

    def __init__(self) -> None:
        super().__init__(EXIT_PREEMPTED)


class StopRequest:
    """Notes SIGTERM and Ctrl-C while it is entered, instead of ending the process.

    After SIGTERM, the process ends with `EXIT_PREEMPTED` at a deadline, whatever it is doing: a
    scheduler would kill it soon after. A second Ctrl-C raises `KeyboardInterrupt`.
    """

    def __init__(self, deadline: float, say: Callable[[str], None]):
        """**Arguments:** the seconds between SIGTERM and the deadline; shows the user a line."""
        self.deadline = deadline
        self.say = say
        self.received: signal.Signals | None = None
        self._timer: threading.Timer | None = None
        self._earlier: dict[signal.Signals, object] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():  # Python's condition for handlers
            for number in (signal.SIGTERM, signal.SIGINT):
                self._earlier[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._earlier.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._earlier = {}
        if self._timer is not None:
            self._timer.cancel()

    def _note(self, number: int, frame: FrameType | None) -> None:
        first, self.received = self.received is None, signal.Signals(number)
        if number == signal.SIGINT:
            if not first:
                raise KeyboardInterrupt
            self.say("stopping after this step, with a checkpoint; Ctrl-C again stops at once")
        elif self._timer is None:
            self.say("SIGTERM: stopping after this step, with a checkpoint")
            self._timer = threading.Timer(self.deadline, self._leave)
            self._timer.daemon = True
            self._timer.start()

    def _leave(self) -> None:
        self.say(
            f"the step was not done {self.deadline:g} s after SIGTERM: ending without another "
            f"checkpoint. The same command continues from the last one."
        )
        os._exit(EXIT_PREEMPTED)
