"""Tools in processes of their own, which can be killed at a timeout."""

import functools
import queue
from collections.abc import Callable, Mapping
from typing import Any

from grpo_eqx.rewards.outcomes import Failure
from grpo_eqx.rewards.workers import TOOLS, WorkerError, WorkerPool


class ToolWorkerError(Exception):
    """A call failed in a worker; the text is that of the error there."""

    def __init__(self, text: str, reason: str):
        """**Arguments:**

        - `text`: what the model reads.
        - `reason`: what happened, as the continuation of a sentence about the tool.
        """
        self.text, self.reason = text, reason

    def __str__(self) -> str:
        return self.text


class InWorker:
    """A tool that is called in a worker. It has the signature of the function."""

    def __init__(self, name: str, func: Callable[..., Any], workers: "ToolWorkers"):
        self._name, self._workers = name, workers
        functools.update_wrapper(self, func)

    def __call__(self, **arguments: Any) -> str:
        return self._workers.call(self._name, arguments)


class ToolWorkers:
    """Worker processes, each of which runs one call of a tool at a time.

    They start with the first call, or `start`.
    """

    def __init__(
        self, funcs: Mapping[str, Callable[..., Any]], count: int, timeout: float | None = None
    ):
        """**Arguments:**

        - `funcs`: plain functions by name.
        - `count`: number of workers.
        - `timeout`: limit of a call in seconds, at which its worker is killed; by default none.

        Raises `UserError` for a function that another process cannot import.
        """
        self._pools = [WorkerPool(funcs, 1, kind=TOOLS) for _ in range(count)]
        self._timeout = timeout
        self._free = queue.SimpleQueue[WorkerPool]()
        for pool in self._pools:
            self._free.put(pool)

    def start(self) -> None:
        """Starts all workers.

        Raises `UserError` where they cannot import a function, and `RewardError` where they cannot
        start.
        """
        for pool in self._pools:
            pool.begin()
        for pool in self._pools:  # which start beside each other
            pool.start()

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Calls a tool, as soon as a worker is free; returns its answer as text.

        Raises `ToolWorkerError` where the call raises, takes too long, or ends its process.
        """
        pool = self._free.get()
        try:
            (result,) = pool.call(name, 1, lambda _: arguments, str, timeout=self._timeout)
        finally:
            self._free.put(pool)
        if isinstance(result, Failure):
            text = result.reason if result.cause is None else str(result.cause)
            if isinstance(result.cause, WorkerError):
                text = result.cause.text  # without the traceback
            raise ToolWorkerError(text, result.reason) from result.cause
        assert result is not None  # every call has ended
        return result

    def close(self) -> None:
        """Ends the workers, and all processes that they started."""
        for pool in self._pools:
            pool.close()
