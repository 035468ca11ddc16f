"""Lines on what a run is doing before and between its steps, and progress bars of long loops."""

import contextlib
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence

from rich.progress import track

from grpo_eqx.common.clean_text import print_clean
from grpo_eqx.distributed.startup import is_main
from grpo_eqx.tracking.phases import PHASES, Phase
from grpo_eqx.tracking.safe_console import safe_console

_LONG_STAGE_S = 1.0


class Stages:
    """Lines on standard error that say what a run is doing, with the seconds since its start."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self._lock, self._over = threading.RLock(), False

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    def say(self, text: str) -> None:
        """Prints what begins now, on the main process."""
        # Standard error may be a file on a full disk, which is no reason to end a run.
        with self._lock, contextlib.suppress(OSError):
            if is_main() and not self._over:
                print_clean(f"[{self.seconds:3.0f} s] {text}", file=sys.stderr)

    @contextlib.contextmanager
    def silent_after_errors(self) -> Iterator[None]:
        """Prints nothing more once an error has left the context: threads may still be at work."""
        try:
            yield
        except BaseException:
            with self._lock:
                self._over = True
            raise

    @contextlib.contextmanager
    def lasting(self, text: str) -> Iterator[None]:
        """Names the work of the context, in a line if the work takes longer than a second.

        A live display shows the work at once, without a line.
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


def track_on_terminal(items: Sequence[int], description: str) -> Iterable[int]:
    """Iterates with a progress bar on the main process's terminal, which is removed at the end.

    A live display, where there is one, says how far the loop is.
    """
    if PHASES.are_shown:
        return _as_phase(items, description)
    console = safe_console()
    hidden = not (console.is_terminal and is_main())
    return track(items, description, console=console, transient=True, disable=hidden)


def _as_phase(items: Sequence[int], description: str) -> Iterator[int]:
    with PHASES.lasting(Phase(description, total=len(items))) as phase:
        for item in items:
            yield item
            phase.done += 1
