"""Lines that say what a run is doing, before and between its steps."""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

from grpo_eqx.common.clean_text import print_clean
from grpo_eqx.distributed.startup import is_main
from grpo_eqx.tracking.phases import PHASES, Phase

_LONG_STAGE_S = 1.0


class Stages:
    """Lines on standard error that say what a run is doing, with the seconds since it began."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self._lock, self._over = threading.RLock(), False

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    def say(self, text: str) -> None:
        """Says what begins now, on the main process."""
        # Its disk may be full: no reason to end a run.
        with self._lock, contextlib.suppress(OSError):
            if is_main() and not self._over:
                print_clean(f"[{self.seconds:3.0f} s] {text}", file=sys.stderr)

    @contextlib.contextmanager
    def silent_after_errors(self) -> Iterator[None]:
        """Says nothing once an error has left the context: threads may still be at work."""
        try:
            yield
        except BaseException:
            with self._lock:
                self._over = True
            raise

    @contextlib.contextmanager
    def lasting(self, text: str) -> Iterator[None]:
        """Says what is done while the context is entered, where that takes some time.

        A live display shows it by itself.
        """
        timer = threading.Timer(_LONG_STAGE_S, self._say_unshown, [text])
        timer.daemon = True
        timer.start()
        try:
            with PHASES.lasting(Phase(text)):
                yield
        finally:
            timer.cancel()

    def _say_unshown(self, text: str) -> None:
        if not PHASES.are_shown:
            self.say(text)
