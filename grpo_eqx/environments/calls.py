"""Calls of users' functions: plain ones in threads, async ones in one event loop."""

import asyncio
import concurrent.futures
import contextlib
import contextvars
import inspect
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from grpo_eqx.common.event_loop import LoopThread
from grpo_eqx.common.process_state import warn
from grpo_eqx.rewards.contract import reason_of

MOST_THREADS = 256
"""Plain functions that run at a time; others wait for their turn."""
LONGEST_CLOSE = 30.0
"""Seconds that `close` of an environment may take where calls have no limit."""


class StillRunsError(TimeoutError):
    """A call took too long, and may still run."""


class Call(NamedTuple):
    """A function with its arguments."""

    func: Callable[..., Any]
    arguments: Mapping[str, Any]


class Outcome(NamedTuple):
    """Result of a call, or its error."""

    result: Any
    error: BaseException | None = None
    """Error that it raised; `StillRunsError` where it took too long."""
    seconds: float = 0.0


class Calls:
    """Runner of calls. Plain functions run in threads, so that none waits for another.

    A call that takes too long is left behind: nothing can end a thread. Its thread is a daemon,
    which does not keep the process from ending.
    """

    def __init__(self, timeout: float | None = None):
        """**Arguments:**

        - `timeout`: limit of a call in seconds; by default none.
        """
        self.timeout = timeout
        self._loop = LoopThread("environments", _warn_of_a_task)
        self._threads = asyncio.Semaphore(MOST_THREADS)

    def together(self, calls: Sequence[Call]) -> concurrent.futures.Future[list[Outcome]]:
        """Starts calls beside each other; their outcomes have their order."""
        return self._loop.run(self._gathered(calls, self.timeout))

    def in_order(self, calls: Sequence[Call]) -> concurrent.futures.Future[list[Outcome]]:
        """Starts calls one after the other, as those that change one environment."""
        return self._loop.run(self._chained(calls))

    async def awaited(self, calls: Sequence[Call]) -> list[Outcome]:
        """Runs calls beside each other, and awaits their outcomes in another event loop."""
        return await asyncio.wrap_future(self.together(calls))

    def close_all(self, objects: Sequence[Any], *, waits: bool = True) -> None:
        """Calls `close` of those objects that have it, and warns of each that fails.

        **Arguments:**

        - `objects`: the objects.
        - `waits`: whether to wait for them.
        """
        closing = [
            Call(each.close, {}) for each in objects if callable(getattr(each, "close", None))
        ]
        if closing:
            seconds = LONGEST_CLOSE if self.timeout is None else self.timeout
            running = self._loop.run(self._gathered(closing, seconds))
            running.add_done_callback(_warn_of_failures)
            if waits:
                concurrent.futures.wait([running])

    def close(self) -> None:
        """Ends the event loop and its tasks. The next call starts it again."""
        self._loop.close()
        self._threads = asyncio.Semaphore(MOST_THREADS)  # belongs to an event loop

    async def _gathered(self, calls: Sequence[Call], timeout: float | None) -> list[Outcome]:
        return list(await asyncio.gather(*(self._outcome(call, timeout) for call in calls)))

    async def _chained(self, calls: Sequence[Call]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for call in calls:
            if outcomes and isinstance(outcomes[-1].error, StillRunsError):
                outcomes.append(Outcome(None, StillRunsError("an earlier call still runs")))
            else:
                outcomes.append(await self._outcome(call, self.timeout))
        return outcomes

    async def _outcome(self, call: Call, timeout: float | None) -> Outcome:
        """Runs a call, once a thread is free for it, where it needs one."""
        is_async = inspect.iscoroutinefunction(call.func)
        async with contextlib.nullcontext() if is_async else self._threads:
            start = time.monotonic()
            task = asyncio.ensure_future(_awaited(call) if is_async else _in_thread(call))
            done, _ = await asyncio.wait([task], timeout=timeout)
            seconds = time.monotonic() - start
        if not done:
            task.cancel()  # not awaited, because it may refuse
            return Outcome(None, StillRunsError(f"took more than {timeout:g} s"), seconds)
        return task.result()._replace(seconds=seconds)


async def _awaited(call: Call) -> Outcome:
    try:
        return Outcome(await call.func(**call.arguments))
    except BaseException as error:
        return Outcome(None, error)


async def _in_thread(call: Call) -> Outcome:
    """Runs a plain function in a thread; what it returns may be awaitable."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Outcome] = loop.create_future()

    def settle(outcome: Outcome) -> None:
        if not done.done():
            done.set_result(outcome)

    def run() -> None:
        try:
            outcome = Outcome(call.func(**call.arguments))
        except BaseException as error:
            outcome = Outcome(None, error)
        try:
            loop.call_soon_threadsafe(settle, outcome)
        except RuntimeError:  # the loop is closed
            return

    context = contextvars.copy_context()
    try:
        threading.Thread(target=context.run, args=[run], name="tool", daemon=True).start()
    except RuntimeError as error:  # as many threads as the process may have
        return Outcome(None, error)
    outcome = await done
    if inspect.isawaitable(outcome.result):
        return await _awaited(Call(lambda: outcome.result, {}))
    return outcome


def _warn_of_failures(closed: concurrent.futures.Future[list[Outcome]]) -> None:
    """Warns of environments whose `close` failed."""
    if not closed.cancelled():
        for error in filter(None, (outcome.error for outcome in closed.result())):
            warn(f"close of an environment {reason_of(error)}")


def _warn_of_a_task(error: BaseException) -> None:
    """Warns of an error in a task that a tool started and did not await."""
    warn(f"a task that an async tool did not await {reason_of(error)}")
