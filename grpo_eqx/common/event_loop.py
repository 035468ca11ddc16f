"""An event loop in a thread of its own."""

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

_T = TypeVar("_T")
_LAST_SECONDS = 1.0
"""Seconds that cancelled tasks have to end."""
GRACE = 5.0
"""Seconds that an event loop has to notice that its time is up."""


class LoopThread:
    """An event loop in a thread, so that functions can keep their connections between calls.

    The thread starts with the first call, and is a daemon: a function that blocks it cannot keep
    the process from ending. It runs the loop again whenever a function stops it, until `close`.
    """

    def __init__(self, name: str, on_error: Callable[[BaseException], None]) -> None:
        """**Arguments:**

        - `name`: name of the thread.
        - `on_error`: called with the error of a task that nothing awaits.
        """
        self._name, self._on_error = name, on_error
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def run(self, call: Coroutine[Any, Any, _T]) -> concurrent.futures.Future[_T]:
        """Starts to await a coroutine."""
        if self._loop is None:
            self._loop, self._closed = asyncio.new_event_loop(), threading.Event()
            self._loop.set_exception_handler(self._handle)
            self._thread = threading.Thread(
                target=_serve, args=[self._loop, self._closed], name=self._name, daemon=True
            )
            self._thread.start()
        return asyncio.run_coroutine_threadsafe(call, self._loop)

    def close(self) -> None:
        """Ends the event loop and all its tasks."""
        if self._loop is None or self._thread is None:
            return
        self._closed.set()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(GRACE)
        self._loop = self._thread = None

    def _handle(self, loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, BaseException):
            self._on_error(error)


def _serve(loop: asyncio.AbstractEventLoop, closed: threading.Event) -> None:
    """Runs a loop until `closed` is set, and ends the tasks that are left in it."""
    asyncio.set_event_loop(loop)
    while not closed.is_set():
        with contextlib.suppress(BaseException):  # such as sys.exit in a task, or stop()
            loop.run_forever()
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    with contextlib.suppress(BaseException):
        if tasks:
            loop.run_until_complete(asyncio.wait(tasks, timeout=_LAST_SECONDS))
        loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()
