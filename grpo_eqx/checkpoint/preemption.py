"""Requests to end a run early: by a scheduler, a person, or the cloud that owns the machine."""

import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType

from grpo_eqx.common.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED
from grpo_eqx.distributed.exits import exit_at_once
from grpo_eqx.distributed.maintenance import MaintenanceWatch

_AT_ONCE_SECONDS = 3.0
"""Seconds that a process has to end by itself after a second Ctrl-C."""


class Preempted(SystemExit):
    """Ends a process whose run was asked to stop, with `EXIT_PREEMPTED`, after a checkpoint."""

    def __init__(self) -> None:
        super().__init__(EXIT_PREEMPTED)


class StopRequest:
    """Notes SIGTERM and Ctrl-C while it is entered, instead of ending the process.

    After SIGTERM, the process ends with `EXIT_PREEMPTED` at a deadline, whatever it is doing, even
    if that is compiling: a scheduler would kill it soon after. A second Ctrl-C raises
    `KeyboardInterrupt`, and ends the process if that is not served soon. A notice of Google's
    metadata server, which comes before SIGTERM, asks for the same as SIGTERM, without a deadline.
    """

    def __init__(self, deadline: float, say: Callable[[str], None]):
        """**Arguments:**

        - `deadline`: seconds between SIGTERM and the end of the process.
        - `say`: shows the user a line, in the process that is asked.
        """
        self.deadline = deadline
        self.say = say
        self.received = False
        self.is_served = False
        """Whether the checkpoint has been written."""
        self._maintenance = MaintenanceWatch(self._note_maintenance)
        self._deadline: threading.Timer | None = None
        self._at_once: threading.Timer | None = None
        self._interrupted = False
        self._earlier: dict[signal.Signals, object] = {}
        self._wakeup: tuple[socket.socket, int] | None = None

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():  # Python's condition for handlers
            # Handlers run only between Python's own instructions, and compiling takes minutes.
            reader, writer = socket.socketpair()
            writer.setblocking(False)
            earlier = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
            self._wakeup = writer, earlier
            threading.Thread(target=self._await_signals, args=(reader,), daemon=True).start()
            for number in (signal.SIGTERM, signal.SIGINT):
                self._earlier[number] = signal.signal(number, self._note)
        self._maintenance.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._maintenance.__exit__()
        if self._at_once is not None:
            self._at_once.cancel()
        if self._deadline is not None:
            return  # the process will end soon, and until then keeps to the deadline
        for number, handler in self._earlier.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._earlier = {}
        if self._wakeup is not None:
            writer, earlier = self._wakeup
            signal.set_wakeup_fd(earlier)
            writer.close()
            self._wakeup = None

    def _await_signals(self, reader: socket.socket) -> None:
        """Sets the time by which signals are served, whatever the main thread is doing."""
        interrupts = 0
        with reader:
            while number := reader.recv(1):
                interrupts += number[0] == signal.SIGINT
                if number[0] == signal.SIGTERM and self._deadline is None:
                    self._deadline = _start_timer(self.deadline, self._leave)
                if interrupts == 2 and self._at_once is None:
                    self.say("stopping at once, without another checkpoint")
                    self._at_once = _start_timer(
                        _AT_ONCE_SECONDS, lambda: exit_at_once(EXIT_INTERRUPTED)
                    )

    def _note(self, number: int, frame: FrameType | None) -> None:
        first, self.received = not self.received, True
        if number == signal.SIGINT:
            if self._interrupted:
                raise KeyboardInterrupt
            self._interrupted = True
            self.say("stopping after this step, with a checkpoint; Ctrl-C again stops at once")
        elif first:
            self.say(
                f"SIGTERM: stopping after this step, with a checkpoint if that is written within "
                f"{self.deadline:g} s"
            )

    def _note_maintenance(self, notice: str) -> None:
        self.received = True
        self.say(f"{notice}: stopping after this step, with a checkpoint")

    def _leave(self) -> None:
        try:
            if not self.is_served:
                self.say(
                    f"the step was not saved {self.deadline:g} s after SIGTERM: ending without "
                    f"another checkpoint. The same command continues from the last one, or starts "
                    f"anew if there is none. preemption_deadline sets the seconds."
                )
        finally:
            exit_at_once(EXIT_PREEMPTED)


def _start_timer(seconds: float, function: Callable[[], None]) -> threading.Timer:
    timer = threading.Timer(seconds, function)
    timer.daemon = True
    timer.start()
    return timer
