"""Calls of users' functions: plain ones in threads, async ones in one event loop."""

import asyncio
import concurrent.futures
import contextvars
import inspect
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from grpo_eqx.common.event_loop import LoopThread
from grpo_eqx.common.process_state import warn
from grpo_eqx.rewards.contract import reason_of


class Call(NamedTuple):
    """A function with its arguments."""

    func: Callable[..., Any]
    arguments: Mapping[str, Any]


class Outcome(NamedTuple):
    """Result of a call, or its error."""

    result: Any
    error: BaseException | None = None
    """Error that it raised; `TimeoutError` where it took too long."""
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

    def together(self, calls: Sequence[Call]) -> concurrent.futures.Future[list[Outcome]]:
        """Starts calls beside each other; their outcomes have their order."""
        return self._loop.run(self._gathered(calls))

    def in_order(self, calls: Sequence[Call]) -> concurrent.futures.Future[list[Outcome]]:
        """Starts calls one after the other, as those that change one environment."""
        return self._loop.run(self._chained(calls))

    def close(self) -> None:
        """Ends the event loop and its tasks."""
        self._loop.close()

    async def _gathered(self, calls: Sequence[Call]) -> list[Outcome]:
        return list(await asyncio.gather(*(self._outcome(call) for call in calls)))

    async def _chained(self, calls: Sequence[Call]) -> list[Outcome]:
        return [await self._outcome(call) for call in calls]

    async def _outcome(self, call: Call) -> Outcome:
        start = time.monotonic()
        running = _awaited(call) if inspect.iscoroutinefunction(call.func) else _in_thread(call)
        task = asyncio.ensure_future(running)
        done, _ = await asyncio.wait([task], timeout=self.timeout)
        seconds = time.monotonic() - start
        if not done:
            task.cancel()  # not awaited, because it may refuse
            return Outcome(None, TimeoutError(f"took more than {self.timeout:g} s"), seconds)
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


def _warn_of_a_task(error: BaseException) -> None:
    """Warns of an error in a task that a tool started and did not await."""
    warn(f"a task that an async tool did not await {reason_of(error)}")
