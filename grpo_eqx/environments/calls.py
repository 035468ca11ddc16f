"""Calls of users' functions: plain ones in threads or workers, async ones in one event loop."""

import asyncio
import concurrent.futures
import contextlib
import contextvars
import functools
import inspect
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from grpo_eqx.common.errors import RunError, class_name
from grpo_eqx.common.event_loop import GRACE, LoopThread
from grpo_eqx.common.process_state import warn
from grpo_eqx.environments.left_processes import LEFT, THREAD
from grpo_eqx.environments.tool_workers import InWorker, ToolWorkerError
from grpo_eqx.rewards.contract import reason_of

_T = TypeVar("_T")
MOST_THREADS = 256
"""Plain functions that run at a time; others wait for their turn."""
LONGEST_CLOSE = 30.0
"""Seconds that `close` of an environment may take where calls have no limit."""


class StillRunsError(TimeoutError):
    """A call took too long, and may still run."""


class ReturnedError(ValueError):
    """A call returned what it must not; the text says what, and the fix."""


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


def failure_of(error: BaseException) -> str:
    """Describes why a call failed, as the continuation of a sentence about it."""
    if isinstance(error, ToolWorkerError):
        return error.reason
    if isinstance(error, StillRunsError):
        return f"ran out of time: it {error} (tool_timeout)"
    if isinstance(error, ReturnedError):
        return f"returned {error}"
    return reason_of(error)


class Calls:
    """Runner of calls. Plain functions run in threads, so that none waits for another.

    A call that takes too long is left behind: nothing can end a thread. Its thread is a daemon,
    which does not keep the process from ending.
    """

    def __init__(self, timeout: float | None = None, num_workers: int = 0, most: int | None = None):
        """**Arguments:**

        - `timeout`: limit of a call in seconds; by default none.
        - `num_workers`: number of workers, for calls of tools in them.
        - `most`: number of calls that run at a time; by default, all async ones do.
        """
        self.timeout, self._num_workers, self._most = timeout, num_workers, most
        self._ping: concurrent.futures.Future[None] | None = None
        self._pinged = 0.0
        self._loop = LoopThread(THREAD, _warn_of_a_task)
        self._new_semaphores()

    def together(self, calls: Sequence[Call]) -> concurrent.futures.Future[list[Outcome]]:
        """Starts calls beside each other; their outcomes have their order."""
        return self._loop.run(self._gathered(calls, self.timeout))

    def in_order(self, calls: Sequence[Call]) -> concurrent.futures.Future[list[Outcome]]:
        """Starts calls one after the other, as those that change one environment."""
        return self._loop.run(self._chained(calls))

    def result(self, running: concurrent.futures.Future[_T]) -> _T:
        """Waits for calls; raises `RunError` if one of them blocks the event loop."""
        while True:
            with contextlib.suppress(concurrent.futures.TimeoutError):
                return running.result(GRACE)
            if not running.done():
                self.check_loop()

    async def awaited(self, calls: Sequence[Call]) -> list[Outcome]:
        """Runs calls beside each other, and awaits their outcomes in another event loop."""
        return await asyncio.to_thread(self.result, self.together(calls))

    def check_loop(self) -> None:
        """Raises `RunError` where a call blocks the event loop, so that no other can go on."""
        try:
            self._loop.run(asyncio.sleep(0)).result(GRACE)
        except concurrent.futures.TimeoutError:
            raise RunError(
                "an async tool or environment blocks its event loop, so that no call can go on: "
                "await whatever it waits for, or make it a plain function, which runs in a thread."
            ) from None

    def seconds_blocked(self) -> float:
        """Returns for how long calls have blocked the event loop, if this is called repeatedly."""
        if self._ping is None or self._ping.done():
            self._ping, self._pinged = self._loop.run(asyncio.sleep(0)), time.monotonic()
        return time.monotonic() - self._pinged

    def close_all(self, objects: Sequence[Any]) -> list[concurrent.futures.Future[list[Outcome]]]:
        """Starts to call `close` of those objects that have it; warns of each that fails.

        **Returns:** what to wait for; nothing where no object has it.
        """
        closing = [each for each in objects if callable(getattr(each, "close", None))]
        if not closing:
            return []
        seconds = LONGEST_CLOSE if self.timeout is None else self.timeout
        calls = [Call(each.close, {}) for each in closing]
        running = self._loop.run(self._gathered(calls, seconds))
        running.add_done_callback(functools.partial(_warn_of_failures, closing))
        return [running]

    def close(self) -> None:
        """Ends the event loop and its tasks. The next call starts it again."""
        self._loop.close()
        self._new_semaphores()

    def _new_semaphores(self) -> None:
        """Makes what holds calls back until a thread or a worker is free for them."""
        self._threads = asyncio.Semaphore(self._most or MOST_THREADS)  # belongs to an event loop
        self._workers = asyncio.Semaphore(self._num_workers)

    async def _gathered(self, calls: Sequence[Call], timeout: float | None) -> list[Outcome]:
        return list(await asyncio.gather(*(self._outcome(call, timeout) for call in calls)))

    async def _chained(self, calls: Sequence[Call]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for call in calls:
            if outcomes and isinstance(outcomes[-1].error, StillRunsError):
                outcomes.append(
                    Outcome(None, StillRunsError("waited for an earlier call, which still runs"))
                )
            else:
                outcomes.append(await self._outcome(call, self.timeout))
        return outcomes

    async def _outcome(self, call: Call, timeout: float | None) -> Outcome:
        """Runs a call, once a thread or a worker is free for it, where it needs one."""
        is_async, free = inspect.iscoroutinefunction(call.func), self._threads
        if isinstance(call.func, InWorker):
            free, timeout = self._workers, None  # its worker is killed then
        async with contextlib.nullcontext() if is_async and self._most is None else free:
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
    finally:
        LEFT.record()


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Has Ctrl-C raise `KeyboardInterrupt` where it would end the process at once.

    So that environments are closed.
    """
    is_main_thread = threading.current_thread() is threading.main_thread()
    if not is_main_thread or signal.getsignal(signal.SIGINT) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


async def awaited(func: Callable[[], Any]) -> Any:
    """Calls a function, a plain one in a thread, and returns its result or raises its error."""
    if inspect.iscoroutinefunction(func):
        return await func()
    outcome = await _in_thread(Call(func, {}))
    if outcome.error is not None:
        raise outcome.error
    return outcome.result


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
        LEFT.record()
        try:
            loop.call_soon_threadsafe(settle, outcome)
        except RuntimeError:  # the loop is closed
            return

    context = contextvars.copy_context()
    try:
        threading.Thread(target=context.run, args=[run], name=THREAD, daemon=True).start()
    except RuntimeError as error:  # as many threads as the process may have
        return Outcome(None, error)
    outcome = await done
    if inspect.isawaitable(outcome.result):
        return await _awaited(Call(lambda: outcome.result, {}))
    return outcome


def _warn_of_failures(
    objects: Sequence[Any], closed: concurrent.futures.Future[list[Outcome]]
) -> None:
    """Warns of environments whose `close` failed, once for what they have in common."""
    if not closed.cancelled():
        said = {
            f"close of environment {class_name(each)} {failure_of(outcome.error)}"
            for each, outcome in zip(objects, closed.result(), strict=True)
            if outcome.error is not None
        }
        for each in sorted(said):
            warn(each)


def _warn_of_a_task(error: BaseException) -> None:
    """Warns of an error in a task that a tool started and did not await."""
    warn(f"a task that an async tool did not await {reason_of(error)}")
