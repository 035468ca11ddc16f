"""Calls of `async` reward functions, all awaited together."""

import asyncio
import concurrent.futures
import dataclasses
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from grpo_eqx.common.errors import RewardError
from grpo_eqx.common.event_loop import GRACE, LoopThread
from grpo_eqx.common.process_state import warn
from grpo_eqx.rewards.contract import Reading, read_rewards, reason_of
from grpo_eqx.rewards.limits import RewardLimits
from grpo_eqx.rewards.outcomes import Failure, Outcome, Samples, outcomes_of, raised

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
    """Calls in an event loop, so that functions can keep their connections between batches."""

    def __init__(self, limits: RewardLimits):
        self.limits = limits
        self._loop = LoopThread("rewards", _warn_of_a_task)

    def start(self, name: str, func: AsyncFunc, samples: Samples) -> AsyncCall:
        """Starts to score a batch."""
        seconds = self.limits.shortest
        latest = None if seconds is None else time.monotonic() + seconds + GRACE
        outcomes = self._loop.run(_scored(name, func, samples, self.limits))
        return AsyncCall(name, len(samples), outcomes, latest)

    def close(self) -> None:
        """Ends the event loop and all its tasks."""
        self._loop.close()


def _warn_of_a_task(error: BaseException) -> None:
    """Warns of an error in a task that a function started and did not await."""
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
    logging = [samples.call(name) for samples in calls]

    async def call(first: int, samples: Samples) -> list[Reading] | str | Failure:
        try:
            returned = await func(**(samples.arguments() | logging[first].arguments))
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
        for own, reply in zip(logging, replies, strict=True):
            own.end(failed=isinstance(reply, Failure))
        return [x if isinstance(x, Failure) else outcomes_of(name, x) for x in replies]
    finally:
        for task in tasks:
            task.cancel()  # not awaited, because it may refuse
