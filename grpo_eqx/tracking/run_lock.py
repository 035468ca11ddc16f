"""Lock of an output folder, so that two runs never write to one."""

import contextlib
import datetime
import fcntl
import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import IO, Any

from grpo_eqx.distributed.exchange import raise_on_all_hosts
from grpo_eqx.distributed.startup import is_main
from grpo_eqx.errors import UserError

_SIGN_SECONDS = 20.0
_STALE_SECONDS = 120.0
"""Age of the last sign of a run on another host, after which it is taken to have ended."""


class RunLock:
    """Lock of a run's folder while it is entered, held by the run's first process.

    The operating system ends a lock with its process, so that one which was killed leaves none. Not
    every file system does so between hosts: there, a run gives a sign of life through the time of
    its file.
    """

    def __init__(self, folder: Path):
        self.path = folder / ".lock"
        self._file: IO[str] | None = None
        self._ended = threading.Event()

    def check_free(self) -> None:
        """Raises `UserError`, saying who has the folder, where a run does; creates nothing."""
        if not is_main() or not self.path.exists():
            return
        with self.path.open() as file:
            self._lock(file, fcntl.LOCK_SH)

    def __enter__(self) -> "RunLock":
        """Takes the lock; raises `UserError`, saying who has it, where another run does."""
        raise_on_all_hosts(self._take)
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._file is not None:
            with contextlib.suppress(OSError):  # the disk may be full
                self._file.truncate(0)
            self._file.close()
            self._file = None

    def _take(self) -> None:
        if not is_main():
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = self.path.open("a+")
        try:
            self._lock(file, fcntl.LOCK_EX)
        except UserError:
            file.close()
            raise
        started = datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
        own = {"host": socket.gethostname(), "process": os.getpid(), "started": started}
        file.truncate(0)
        file.write(json.dumps(own) + "\n")
        file.flush()
        self._file, self._ended = file, threading.Event()
        threading.Thread(target=self._give_signs, args=(self._ended,), daemon=True).start()

    def _lock(self, file: IO[str], kind: int) -> None:
        holder = self._holder()
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise self._refusal(holder) from error
        except OSError:  # a file system without locks
            pass
        elsewhere = holder is not None and holder["host"] != socket.gethostname()
        if elsewhere and time.time() - self.path.stat().st_mtime < _STALE_SECONDS:
            raise self._refusal(holder)

    def _holder(self) -> dict[str, Any] | None:
        """Returns what the run in the folder has written about itself, if it has."""
        with contextlib.suppress(OSError, ValueError):
            holder: dict[str, Any] = json.loads(self.path.read_text())
            return holder
        return None

    def _refusal(self, holder: dict[str, Any] | None) -> UserError:
        who = "another run"
        if holder is not None:
            who = (
                f"a run on {holder['host']} (process {holder['process']}, started "
                f"{holder['started']})"
            )
        return UserError(
            f"output_dir {str(self.path.parent)!r} is in use by {who}: wait for it, end it, or "
            f"choose another output_dir or run_name."
        )

    def _give_signs(self, ended: threading.Event) -> None:
        while not ended.wait(_SIGN_SECONDS):
            with contextlib.suppress(OSError):
                os.utime(self.path)
