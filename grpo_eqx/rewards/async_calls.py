"""Calls of `async` reward functions, all awaited together."""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from grpo_eqx.common.errors import RewardError
from grpo_eqx.common.process_state import warn
from grpo_eqx.rewards.contract import Reading, read_rewards, reason_of
from grpo_eqx.rewards.limits import RewardLimits
from grpo_eqx.rewards.outcomes import Failure, Outcome, Samples, outcomes_of, raised

_LAST_SECONDS = 1.0
"""Seconds that cancelled tasks have to end."""
GRACE = 5.0
"""Seconds that an event loop has to notice that its time is up."""

AsyncFunc = Callable[..., Awaitable[Any]]


@dataclasses.dataclass(frozen=True)
class AsyncCall:
    """Call of a function that is scoring a batch."""

    name: str
    number: int
    """Number of completions."""
    outcomes: concurrent.futures.Future[list[Outcome]]
    latest: float | None
    """Time by which all outcomes exist, unless the event loop is blocked."""

    def wait(self) -> list[Outcome]:
        """Returns the outcomes; raises `RewardError` if the function blocks its event loop."""
        left = None if self.latest is None else max(0.0, self.latest - time.monotonic())
        try:
            return self.outcomes.result(left)
        except concurrent.futures.CancelledError:
            return [Failure("cancelled all tasks of its event loop")] * self.number
        except concurrent.futures.TimeoutError:
            raise RewardError(
                f"reward function {self.name} is async and blocks its event loop, so that it "
                f"cannot be stopped: await whatever it waits for, or make it a plain function and "
                f"set reward_workers."
            ) from None


class AsyncCalls:
    """An event loop in a thread, so that functions can keep their connections between batches.

    The thread starts with the first call, and is a daemon: a function that blocks it cannot keep
    the process from ending. It runs the loop again whenever a function stops it, until `close`.
    """

    def __init__(self, limits: RewardLimits):
        self.limits = limits
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, name: str, func: AsyncFunc, samples: Samples) -> AsyncCall:
        """Starts to score a batch."""
        if self._loop is None:
            self._loop, self._closed = asyncio.new_event_loop(), threading.Event()
            self._loop.set_exception_handler(_warn_of_a_task)
            self._thread = threading.Thread(
                target=_serve, args=[self._loop, self._closed], name="rewards", daemon=True
            )
            self._thread.start()
        seconds = self.limits.shortest
        latest = None if seconds is None else time.monotonic() + seconds + GRACE
        scored = _scored(name, func, samples, self.limits)
        outcomes = asyncio.run_coroutine_threadsafe(scored, self._loop)
        return AsyncCall(name, len(samples), outcomes, latest)

    def close(self) -> None:
        """Ends the event loop and all its tasks."""
        if self._loop is None or self._thread is None:
            return
        self._closed.set()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(GRACE)
        self._loop = self._thread = None


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


def _warn_of_a_task(loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
    """Warns of an error in a task that a function started and did not await."""
    error = context.get("exception")
    if isinstance(error, BaseException):
        warn(f"a task that an async reward function did not await {reason_of(error)}")


async def _scored(
    name: str, func: AsyncFunc, samples: Samples, limits: RewardLimits
) -> list[Outcome]:
    """Scores a batch in one call, as TRL does, or in one call per completion if each has a timeout.

    If a call for the batch raises, calls for single completions find out on which it fails.
    """
    loop, late = asyncio.get_running_loop(), _late(limits)
    end = None if limits.shortest is None else loop.time() + limits.shortest
    if limits.timeout is None:
        (together,) = await _replies(name, func, [samples], end, late)
        if together is late:
            return [late] * len(samples)
        if not isinstance(together, Failure):
            return together
    each = await _replies(name, func, [samples.one(i) for i in range(len(samples))], end, late)
    return [reply if isinstance(reply, Failure) else reply[0] for reply in each]


def _late(limits: RewardLimits) -> Failure:
    setting = "reward_batch_timeout" if limits.timeout is None else "reward_timeout"
    return Failure(f"ran out of time ({setting} is {limits.shortest} s)")


async def _replies(
    name: str, func: AsyncFunc, calls: Sequence[Samples], end: float | None, late: Failure
) -> list[list[Outcome] | Failure]:
    """Awaits calls together; call `i` begins with completion `i`.

    **Returns:** for each call, its outcomes, or its failure. Raises `RewardError` for a broken
    contract.
    """
    process = os.getpid()

    async def call(first: int, samples: Samples) -> list[Reading] | str | Failure:
        try:
            returned = await func(**samples.arguments())
            return read_rewards(returned, len(samples), first=first)
        except BaseException as error:
            return raised(error)
        finally:
            if os.getpid() != process:  # a process that the function forked
                os._exit(0)

    tasks = [asyncio.create_task(call(i, samples)) for i, samples in enumerate(calls)]
    try:
        left = None if end is None else max(0.0, end - asyncio.get_running_loop().time())
        await asyncio.wait(tasks, timeout=left)
        replies = [task.result() if task.done() else late for task in tasks]
        return [x if isinstance(x, Failure) else outcomes_of(name, x) for x in replies]
    finally:
        for task in tasks:
            task.cancel()  # not awaited, because it may refuse
