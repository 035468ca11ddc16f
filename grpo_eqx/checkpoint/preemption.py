"""Requests to end a run early: by a scheduler, a person, or the cloud that owns the machine."""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

from grpo_eqx.distributed.maintenance import MaintenanceWatch
from grpo_eqx.errors import EXIT_PREEMPTED


class Preempted(SystemExit):
    """Ends a process whose run was asked to stop, with `EXIT_PREEMPTED`, after a checkpoint."""

    def __init__(self) -> None:
        super().__init__(EXIT_PREEMPTED)


class StopRequest:
    """Notes SIGTERM and Ctrl-C while it is entered, instead of ending the process.

    After SIGTERM, the process ends with `EXIT_PREEMPTED` at a deadline, whatever it is doing: a
    scheduler would kill it soon after. A second Ctrl-C raises `KeyboardInterrupt`. A notice of
    Google's metadata server, which comes before SIGTERM, asks for the same without a deadline.
    """

    def __init__(self, deadline: float, say: Callable[[str], None]):
        """**Arguments:** the seconds between SIGTERM and the deadline; shows the user a line."""
        self.deadline = deadline
        self.say = say
        self.received = False
        self._maintenance = MaintenanceWatch(self._note_maintenance)
        self._timer: threading.Timer | None = None
        self._earlier: dict[signal.Signals, object] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():  # Python's condition for handlers
            for number in (signal.SIGTERM, signal.SIGINT):
                self._earlier[number] = signal.signal(number, self._note)
        self._maintenance.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._maintenance.__exit__()
        for number, handler in self._earlier.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._earlier = {}
        if self._timer is not None:
            self._timer.cancel()

    def _note(self, number: int, frame: FrameType | None) -> None:
        first, self.received = not self.received, True
        if number == signal.SIGINT:
            if not first:
                raise KeyboardInterrupt
            self.say("stopping after this step, with a checkpoint; Ctrl-C again stops at once")
        elif self._timer is None:
            self.say("SIGTERM: stopping after this step, with a checkpoint")
            self._timer = threading.Timer(self.deadline, self._leave)
            self._timer.daemon = True
            self._timer.start()

    def _note_maintenance(self, notice: str) -> None:
        self.say(f"{notice}: stopping after this step, with a checkpoint")
        self.received = True

    def _leave(self) -> None:
        self.say(
            f"the step was not done {self.deadline:g} s after SIGTERM: ending without another "
            f"checkpoint. The same command continues from the last one."
        )
        os._exit(EXIT_PREEMPTED)
