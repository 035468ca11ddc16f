"""Notices that Google will stop this machine: a preemption of a spot VM, or maintenance."""

import os
import threading
from collections.abc import Callable, Mapping

from grpo_eqx.common.errors import UserError
from grpo_eqx.distributed import tpu_metadata

_POLL_SECONDS = 5.0
_NOTICES = {
    "preempted": ("TRUE", "this machine is being preempted"),
    "maintenance-event": (
        "TERMINATE_ON_HOST_MAINTENANCE",
        "this machine's host will be maintained",
    ),
}
"""Announcements of the metadata server, by the name to ask for, and their descriptions."""


class MaintenanceWatch:
    """Thread that watches the metadata server of a TPU VM for announced stops, while it is entered.

    Stops that were announced before the run started do not count: the run uses the time left.
    """

    def __init__(
        self,
        on_notice: Callable[[str], None],
        environment: Mapping[str, str] = os.environ,
        poll_seconds: float = _POLL_SECONDS,
    ):
        """**Arguments:**

        - `on_notice`: called once, in the thread, with the notice.
        - `environment`: environment variables.
        - `poll_seconds`: seconds between requests.
        """
        self.on_notice = on_notice
        self.environment = environment
        self.poll_seconds = poll_seconds
        self._left = threading.Event()

    def __enter__(self) -> "MaintenanceWatch":
        if tpu_metadata.is_expected(self.environment):
            self._left = threading.Event()
            arguments = self._left, self._announced()
            threading.Thread(target=self._watch, args=arguments, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()

    def _watch(self, left: threading.Event, known: set[str]) -> None:
        while not left.wait(self.poll_seconds):
            if notices := self._announced() - known:
                self.on_notice(min(notices))
                return

    def _announced(self) -> set[str]:
        try:
            return {
                text
                for name, (announcement, text) in _NOTICES.items()
                if tpu_metadata.value(name, self.environment) == announcement
            }
        except UserError:  # no answer now; SIGTERM will come in any case
            return set()
