"""Ends a process that hangs, which could otherwise leave its accelerators idle for days."""

import faulthandler
import sys
import threading
import time

from grpo_eqx.common.clean_text import print_clean
from grpo_eqx.common.errors import EXIT_FAULT
from grpo_eqx.distributed.exits import do_last_acts, exit_at_once

_BACKSTOP_SECONDS = 5.0
"""Seconds after the timeout when C code ends the process, if Python's threads cannot run."""


class Watchdog:
    """Timer that ends this process if, while it is entered, nothing progresses for too long.

    The stacks of all threads go to standard error first. In a run of several processes, all wait
    for the process that hangs, so each ends itself. A watchdog can be entered repeatedly.
    """

    def __init__(self, timeout: float | None):
        """**Arguments:**

        - `timeout`: longest seconds without progress; `None` for no limit.
        """
        self.timeout = timeout
        self._last = 0.0
        self._done_last = ""
        self._left = threading.Event()
        self._entered = 0

    def __enter__(self) -> "Watchdog":
        self._entered += 1
        if self.timeout is not None and self._entered == 1:
            self._left = threading.Event()
            self.progress("the start")
            threading.Thread(target=self._watch, args=(self._left,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._entered -= 1
        if self.timeout is not None and self._entered == 0:
            self._left.set()
            faulthandler.cancel_dump_traceback_later()

    def progress(self, done: str) -> None:
        """Records that work is done; `done` names it, such as "the rollout of step 3"."""
        if self.timeout is not None:
            self._last, self._done_last = time.monotonic(), done
            backstop = self.timeout + _BACKSTOP_SECONDS
            faulthandler.dump_traceback_later(backstop, exit=True, file=sys.__stderr__ or 2)

    def _watch(self, left: threading.Event) -> None:
        assert self.timeout is not None
        while not left.wait(max(0.0, self._last + self.timeout - time.monotonic())):
            if time.monotonic() - self._last >= self.timeout:
                self._end()

    def _end(self) -> None:
        do_last_acts()
        stderr = sys.__stderr__ or sys.stderr
        print_clean(
            f"error: no progress for {self.timeout:g} s (hang_timeout) after {self._done_last}: "
            f"ending this process. The same command continues from the last checkpoint, if there "
            f"is one. The stacks of its threads:",
            file=stderr,
        )
        faulthandler.dump_traceback(stderr, all_threads=True)
        exit_at_once(EXIT_FAULT)
