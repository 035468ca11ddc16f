"""Processes that call reward functions, and are killed when they overrun."""

import contextlib
import json
import math
import os
import pickle
import pickletools
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from grpo_eqx.errors import RewardError, UserError, first_line
from grpo_eqx.rewards.limits import RewardLimits
from grpo_eqx.rewards.outcomes import Failure, Outcome, Samples, broken, outcomes_of

_WORKER = Path(__file__).with_name("worker_main.py")
_GUARDIAN = Path(__file__).with_name("guardian_main.py")
_NO_ACCELERATORS = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
_CALLS_PER_WORKER = 1000  # what a function leaks ends with its process
_START_SECONDS = 120.0


class WorkerError(Exception):
    """The traceback of what a reward function raised in a worker."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class WorkerPool:
    """Workers, each of which scores one completion at a time.

    So a completion that crashes, or overruns, is known, and costs no other completion its reward.
    `concurrent.futures` cannot kill a single worker, and `multiprocessing` would run the user's
    script again in each: workers are plain subprocesses, in sessions of their own.
    """

    def __init__(
        self,
        funcs: Mapping[str, Callable[..., Any]],
        count: int,
        *,
        calls_per_worker: int = _CALLS_PER_WORKER,
    ):
        """**Arguments:** the functions by name; the number of workers; the calls after which a
        worker is replaced. Workers start with the first `run`.

        Raises `UserError` for a function that another process cannot import.
        """
        self._setup = {name: _by_reference(name, func) for name, func in funcs.items()}
        self.count = count
        self.calls_per_worker = calls_per_worker
        self._workers: list[_Worker] = []
        self._guardian: _Guardian | None = None

    def run(
        self, name: str, samples: Samples, limits: RewardLimits, *, stop_at_failure: bool = False
    ) -> list[Outcome]:
        """Scores a batch, one completion per call.

        **Arguments:** the function; the batch; the timeouts; whether to return at the first
        failure, when others are `None`.

        Raises `RewardError` where a function breaks its contract, or workers cannot start.
        """
        self._start()
        outcomes: list[Outcome] = [None] * len(samples)
        waiting, unscored = deque(range(len(samples))), set(range(len(samples)))
        end = math.inf
        if limits.batch_timeout is not None:
            end = time.monotonic() + limits.batch_timeout
        try:
            while unscored:
                self._give(name, samples, waiting, limits)
                settled = self._settled(name, end)
                if time.monotonic() >= end:
                    reason = f"ran out of time (reward_batch_timeout is {limits.batch_timeout} s)"
                    settled = {i: settled.get(i, Failure(reason)) for i in unscored}
                for index, outcome in settled.items():
                    outcomes[index] = outcome
                    unscored.discard(index)
                    if stop_at_failure and isinstance(outcome, Failure):
                        return outcomes
            return outcomes
        finally:
            for worker in [each for each in self._workers if each.index is not None]:
                self._end(worker)

    def close(self) -> None:
        """Ends all workers, and what they started."""
        for worker in list(self._workers):
            self._end(worker)
        if self._guardian is not None:
            self._guardian.end()
            self._guardian = None

    def _start(self) -> None:
        """Waits until all workers are there."""
        self._fill()
        while not all(worker.ready for worker in self._workers):
            self._settled("", math.inf)

    def _fill(self) -> None:
        while len(self._workers) < self.count:
            self._guardian = self._guardian or _Guardian()
            worker = _Worker(self._setup)
            self._workers.append(worker)
            self._guardian.note(worker.process.pid)

    def _end(self, worker: "_Worker") -> str:
        self._workers.remove(worker)
        worker.kill()
        if self._guardian is not None:
            self._guardian.note(worker.process.pid)
        return worker.end()

    def _give(self, name: str, samples: Samples, waiting: deque[int], limits: RewardLimits) -> None:
        """Gives idle workers their next completions, and replaces those that have gone."""
        for worker in [each for each in self._workers if each.is_idle]:
            if worker.calls >= self.calls_per_worker or worker.has_died_idle():
                self._end(worker)
            elif waiting:
                worker.give(name, samples, waiting.popleft(), limits.timeout)
        self._fill()

    def _settled(self, name: str, end: float) -> dict[int, Outcome]:
        """Waits for an event; returns the completions whose outcome it decided."""
        active = [worker for worker in self._workers if not worker.is_idle]
        until = min([end, *(worker.deadline for worker in active)])
        left = None if until == math.inf else max(0.0, until - time.monotonic())
        events = wait([source for worker in active for source in worker.sources], left)
        settled: dict[int, Outcome] = {}
        for worker in active:
            index = worker.index
            if any(source in events for source in worker.sources):
                reply = worker.reply()
                if reply is not None:
                    if index is not None:
                        settled[index] = _read(name, reply)
                    continue
                reason = f"lost its process ({self._end(worker)})"
            elif worker.deadline <= time.monotonic():
                self._end(worker)
                name_of_limit = "its limit" if index is None else "reward_timeout"
                reason = f"ran out of time ({name_of_limit} is {worker.seconds} s)"
            else:
                continue
            if index is None:
                raise RewardError(f"a worker for reward functions {reason} as it started.")
            settled[index] = Failure(reason)
        return settled


class _Worker:
    """A worker as its parent sees it."""

    def __init__(self, funcs: Mapping[str, bytes]):
        self.connection: Connection[Any, Any]
        self.connection, theirs = Pipe()
        with theirs:
            self.process = subprocess.Popen(
                # Not with the script's folder on the path, whose modules are others' namesakes.
                [sys.executable, "-P", str(_WORKER), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=os.environ | _NO_ACCELERATORS,
            )
        self.sources: list[Connection[Any, Any] | int] = [self.connection]
        if sys.platform == "linux":  # the pipe stays open if a process that it forked survives it
            self.sources.append(os.pidfd_open(self.process.pid))
        self.ready = False
        self.index: int | None = None
        self.calls = 0
        self.seconds: float | None = _START_SECONDS
        self.deadline = time.monotonic() + _START_SECONDS
        with contextlib.suppress(OSError):  # it has died, which `reply` finds out
            self.connection.send({"path": sys.path, "funcs": dict(funcs)})

    @property
    def is_idle(self) -> bool:
        """Whether it waits for a call."""
        return self.ready and self.index is None

    def has_died_idle(self) -> bool:
        """Returns whether a worker that owes no reply is gone."""
        return bool(wait(self.sources, 0))

    def give(self, name: str, samples: Samples, index: int, seconds: float | None) -> None:
        """Has the worker call a function with one completion."""
        self.index, self.seconds, self.calls = index, seconds, self.calls + 1
        self.deadline = math.inf if seconds is None else time.monotonic() + seconds
        with contextlib.suppress(OSError):  # it has died, which `reply` finds out
            self.connection.send((name, index, samples.one(index).arguments()))

    def reply(self) -> dict[str, Any] | None:
        """Returns what the worker replied, after which it is idle; `None` if it has died."""
        try:
            if not self.connection.poll():
                return None
            reply: dict[str, Any] = json.loads(self.connection.recv_bytes())
        except (EOFError, OSError, ValueError):
            return None
        if "cannot_load" in reply:
            raise UserError(
                f"a process cannot import the reward functions ({reply['cannot_load']}): with "
                f"reward_workers, each must be in a module that Python can import."
            )
        self.ready, self.index, self.deadline = True, None, math.inf
        return reply

    def kill(self) -> None:
        """Kills the worker and what it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left
            os.killpg(self.process.pid, signal.SIGKILL)

    def end(self) -> str:
        """Waits for a killed worker; returns what it ended with."""
        self.connection.close()
        code = self.process.wait()
        for source in self.sources:
            if isinstance(source, int):
                os.close(source)
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"


class _Guardian:
    """The process that kills the workers if this one does not."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-S", str(_GUARDIAN)],
            stdin=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )

    def note(self, pid: int) -> None:
        """Tells it of a worker that starts, or has ended and is not yet waited for."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # somebody killed it
            print(pid, file=self.process.stdin, flush=True)

    def end(self) -> None:
        """Ends it, when no worker is left."""
        self.process.kill()
        with contextlib.suppress(OSError):
            self.process.communicate()


def _read(name: str, reply: Mapping[str, Any]) -> Outcome:
    if "raised" in reply:
        return Failure(reply["raised"], WorkerError(reply["traceback"]))
    if "broken" in reply:
        raise broken(name, reply["broken"])
    return outcomes_of(reply["rewards"])[0]


def _by_reference(name: str, func: Callable[..., Any]) -> bytes:
    """Returns a function as the name of its module and its own; raises `UserError` if it has none.

    The workers do not run the user's script, which would train once more in each.
    """
    fix = (
        "with reward_workers, define it at the top level of a module that can be imported, such as "
        "rewards.py beside your script."
    )
    try:
        pickled = pickle.dumps(func)
    except Exception as error:
        raise UserError(
            f"another process cannot import the reward function {name} ({first_line(error)}): {fix}"
        ) from error
    if any(argument == "__main__" for _, argument, _ in pickletools.genops(pickled)):
        raise UserError(
            f"another process cannot import the reward function {name}, which is in the script "
            f"that runs: {fix}"
        )
    return pickled
