"""Lock of an output folder, so that two runs never write to the same folder."""

import contextlib
import datetime
import fcntl
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from grpo_eqx.common.clean_text import print_clean
from grpo_eqx.common.durable import try_lock
from grpo_eqx.common.errors import FileError, RunError, UserError
from grpo_eqx.common.read_files import read_object
from grpo_eqx.distributed.exchange import raise_on_all_hosts
from grpo_eqx.distributed.startup import is_main
from grpo_eqx.tracking.run_folder import SIGN_SECONDS, RunFolder


class RunLock:
    """Lock of a run's folder while it is entered, held by the run's first process.

    The operating system releases the lock when the process, and the processes that it forked, have
    ended. So a killed run leaves no lock. Not every file system has locks that hold between hosts:
    for these, a run gives signs of life by updating the time of the lock's file.
    """

    def __init__(self, folder: Path):
        self.path = RunFolder(folder).lock
        self._file: IO[str] | None = None
        self._ended = threading.Event()

    def check_free(self) -> None:
        """Raises `UserError`, naming the other run, if the folder is in use; creates nothing."""
        if is_main() and self.path.exists():
            self._open().close()

    def __enter__(self) -> "RunLock":
        """Takes the lock; raises `UserError`, naming the other run, if the folder is in use."""
        raise_on_all_hosts(self._take)
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._file is not None:
            with contextlib.suppress(OSError):  # the disk may be full
                self._file.truncate(0)
            self._remove_empty_folder()
            fcntl.flock(self._file, fcntl.LOCK_UN)  # closing is not enough if a child has it open
            self._file.close()
            self._file = None

    def _remove_empty_folder(self) -> None:
        """Removes the folder if it holds nothing but the lock: the run was refused at its start."""
        folder = self.path.parent
        with contextlib.suppress(OSError):
            if [path.name for path in folder.iterdir()] == [self.path.name]:
                self.path.unlink()
                folder.rmdir()

    def _take(self) -> None:
        if not is_main():
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"output_dir {str(self.path.parent)!r} cannot be written ({error.strerror}): "
                f"choose another."
            ) from error
        file = self._open()
        holder = self._holder()
        if holder is not None and holder.get("host") != socket.gethostname():
            self._await_silence(holder, file)
        started = datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
        own = {"host": socket.gethostname(), "process": os.getpid(), "started": started}
        file.truncate(0)
        file.write(json.dumps(own) + "\n")
        file.flush()
        self._file, self._ended = file, threading.Event()
        threading.Thread(target=self._give_signs, args=(self._ended,), daemon=True).start()

    def _open(self) -> IO[str]:
        """Opens the file and locks it, if the file system has locks."""
        try:
            file = self.path.open("a+")
        except OSError as error:
            raise UserError(
                f"{self.path} cannot be written ({error.strerror or error}): choose another "
                f"output_dir."
            ) from error
        if not try_lock(file):
            file.close()
            raise UserError(self._in_use(self._holder()))
        if os.fstat(file.fileno()).st_nlink == 0:  # its run has just ended and removed the file
            file.close()
            raise UserError(self._in_use(None))
        return file

    def _await_silence(self, holder: Mapping[str, Any], file: IO[str]) -> None:
        """Waits for a sign of life of a run on another host, whose lock may be invisible here.

        Raises `RunError` for a sign: the other run may have ended when the command is repeated.
        """
        before = self.path.stat().st_mtime
        print_clean(
            f"waiting {2 * SIGN_SECONDS:.0f} s for signs of the run on {holder.get('host')} that "
            f"{self.path} names",
            file=sys.stderr,
        )
        time.sleep(2 * SIGN_SECONDS)
        if self.path.stat().st_mtime != before:
            file.close()
            raise RunError(self._in_use(holder))

    def _holder(self) -> Mapping[str, Any] | None:
        """Returns what the run that holds the folder has written about itself, if anything."""
        try:
            return read_object(self.path)
        except FileError:
            return None

    def _in_use(self, holder: Mapping[str, Any] | None) -> str:
        who = "another run"
        if holder is not None:
            who = (
                f"a run on {holder.get('host')} (process {holder.get('process')}, started "
                f"{holder.get('started')})"
            )
        return (
            f"output_dir {str(self.path.parent)!r} is in use by {who}: wait for it, end it, or "
            f"choose another output_dir or run_name."
        )

    def _give_signs(self, ended: threading.Event) -> None:
        while not ended.wait(SIGN_SECONDS):
            with contextlib.suppress(OSError):
                os.utime(self.path)
