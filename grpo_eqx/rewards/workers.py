"""Pool of worker processes that call reward functions or tools, and are killed at a timeout."""

import ast
import contextlib
import math
import os
import pickle
import pickletools
import secrets
import selectors
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from subprocess import Popen, TimeoutExpired
from typing import Any, NamedTuple, TypeVar

from grpo_eqx.common.errors import RewardError, UserError, first_line
from grpo_eqx.rewards.contract import NO_REPLY, reason_of
from grpo_eqx.rewards.limits import RewardLimits
from grpo_eqx.rewards.outcomes import Failure, Outcome, Samples, outcomes_of

_GUARDIAN = Path(__file__).with_name("guardian_main.py")
_NO_ACCELERATORS = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
_CALLS_PER_WORKER = 1000  # memory that a function leaks is freed with its process
_START_SECONDS = 120.0
_GUARDIAN_SECONDS = 15.0
"""Seconds that a guardian has to end all processes of its worker."""
_LAST_WORDS_SECONDS = 1.0
"""Seconds that a guardian has to report its worker's end, before the worker counts as alive."""
_TOKEN_BYTES = 16
_HEAD_BYTES = _TOKEN_BYTES + 4
_LONGEST_REPLY = 1 << 26
_T = TypeVar("_T")


class WorkerKind(NamedTuple):
    """Kind of the functions that workers call: words for messages, and how results are read."""

    func: str
    """Name of the kind."""
    reader: str
    """Function of `contract` that reads in the worker what a function has returned."""
    workers: str
    """Setting of their number."""
    timeout: str
    """Setting of the time that a call may take."""


REWARDS = WorkerKind("reward function", "read_reward_at", "reward_workers", "reward_timeout")
TOOLS = WorkerKind("tool", "read_answer_at", "tool_workers", "tool_timeout")


class WorkerError(Exception):
    """The traceback of an error that a function raised in a worker."""

    def __init__(self, traceback: str, text: str):
        """**Arguments:**

        - `traceback`: the traceback.
        - `text`: the text of the error alone.
        """
        self.traceback, self.text = traceback, text

    def __str__(self) -> str:
        return f"\n{self.traceback}"


class WorkerPool:
    """Workers, each of which makes one call at a time: of a reward function, for one completion.

    So the completion that crashes a function, or exceeds its time, is known, and no other
    completion loses its reward. Workers are plain subprocesses, because `concurrent.futures` cannot
    kill a single worker, and `multiprocessing` would run the user's script again in each. A worker
    has a guardian, which ends all processes that the worker started. Replies of workers are never
    unpickled.
    """

    def __init__(
        self,
        funcs: Mapping[str, Callable[..., Any]],
        count: int,
        *,
        kind: WorkerKind = REWARDS,
        calls_per_worker: int = _CALLS_PER_WORKER,
    ):
        """**Arguments:**

        - `funcs`: the functions by name.
        - `count`: the number of workers, which start with the first `run`.
        - `kind`: what the functions are.
        - `calls_per_worker`: calls after which a worker is replaced.

        Raises `UserError` for a function that another process cannot import.
        """
        self._setup = {name: _by_reference(name, func, kind) for name, func in funcs.items()}
        self.count, self._kind = count, kind
        self.calls_per_worker = calls_per_worker
        self._workers: list[_Worker] = []

    def run(
        self, name: str, samples: Samples, limits: RewardLimits, *, stop_at_failure: bool = False
    ) -> list[Outcome]:
        """Scores a batch with a reward function, one completion per call.

        **Arguments:**

        - `name`: the function.
        - `samples`: the batch.
        - `limits`: the timeouts.
        - `stop_at_failure`: whether to return at the first failure, with `None` for completions
          that are not scored yet.

        Raises `RewardError` if a function breaks its contract, or workers cannot start.
        """

        def arguments(index: int) -> dict[str, Any]:
            own = samples.one(index)
            return {"prompts": own.prompts, "completions": own.completions, **own.columns}

        return self.call(
            name, len(samples), arguments, lambda readings: outcomes_of(name, readings)[0],
            timeout=limits.timeout, batch_timeout=limits.batch_timeout,
            stop_at_failure=stop_at_failure,
        )  # fmt: skip

    def call(
        self,
        name: str,
        count: int,
        arguments: Callable[[int], Mapping[str, Any]],
        read: Callable[[Any], _T | Failure],
        *,
        timeout: float | None = None,
        batch_timeout: float | None = None,
        stop_at_failure: bool = False,
    ) -> list[_T | Failure | None]:
        """Makes `count` calls of a function, and waits for them.

        **Arguments:**

        - `name`: the function.
        - `arguments`: makes the arguments of the call with a number.
        - `read`: reads what the reader of the worker's kind has returned.
        - `timeout`: limit of a call in seconds; by default none.
        - `batch_timeout`: limit of all calls in seconds; by default none.
        - `stop_at_failure`: whether to return at the first failure, with `None` for calls that have
          not ended yet.

        Raises what `read` raises, and `RewardError` if workers cannot start.
        """
        self.start()
        results: list[_T | Failure | None] = [None] * count
        waiting, unsettled = deque(range(count)), set(range(count))
        end = math.inf if batch_timeout is None else time.monotonic() + batch_timeout
        try:
            while unsettled:
                self._give(name, arguments, waiting, timeout)
                settled = self._settled(read, end)
                if time.monotonic() >= end:
                    reason = f"ran out of time (reward_batch_timeout is {batch_timeout} s)"
                    settled = {i: settled.get(i, Failure(reason)) for i in unsettled}
                for index, result in settled.items():
                    results[index] = result
                    unsettled.discard(index)
                    if stop_at_failure and isinstance(result, Failure):
                        return results
            return results
        finally:
            self._end(*(worker for worker in self._workers if worker.index is not None))

    def close(self) -> None:
        """Ends all workers and the processes that they started."""
        self._end(*self._workers)

    def start(self) -> None:
        """Starts all workers, and waits until they are ready."""
        self.begin()
        while not all(worker.ready for worker in self._workers):
            self._settled(lambda _: None, math.inf)

    def begin(self) -> None:
        """Starts the workers that are missing, and does not wait until they are ready."""
        while len(self._workers) < self.count:
            self._workers.append(_Worker(self._setup, self._kind))

    def _end(self, *workers: "_Worker") -> None:
        """Ends workers and the processes that they started, all at once."""
        for worker in workers:
            worker.kill()
        for worker in workers:
            self._workers.remove(worker)
            worker.end()

    def _give(
        self,
        name: str,
        arguments: Callable[[int], Mapping[str, Any]],
        waiting: deque[int],
        timeout: float | None,
    ) -> None:
        """Gives idle workers their next calls, and replaces workers that have ended."""
        for worker in [each for each in self._workers if each.is_idle]:
            if worker.calls >= self.calls_per_worker or worker.has_died_idle():
                self._end(worker)
            elif waiting:
                index = waiting.popleft()
                worker.give(name, index, arguments(index), timeout)
        self.begin()

    def _settled(self, read: Callable[[Any], _T | Failure], end: float) -> dict[int, _T | Failure]:
        """Waits for an event; returns the results that it settles, by the number of the call."""
        active = [worker for worker in self._workers if not worker.is_idle]
        until = min([end, *(worker.deadline for worker in active)])
        _wait(active, None if until == math.inf else max(0.0, until - time.monotonic()))
        settled: dict[int, _T | Failure] = {}
        for worker in active:
            index = worker.index
            try:
                reply = worker.reply()
                if reply is None and worker.deadline > time.monotonic():
                    continue
            except _LostError as lost:
                self._end(worker)
                reason, cause = str(lost), None
            else:
                if reply is not None:
                    if index is not None:
                        settled[index] = _read(reply, read)
                    continue
                self._end(worker)
                name_of_limit = "its limit" if index is None else self._kind.timeout
                reason = f"ran out of time ({name_of_limit} is {worker.seconds} s)"
                cause = TimeoutError(f"took more than {worker.seconds:g} s")
            if index is None:
                raise RewardError(f"a worker for {self._kind.func}s {reason} as it started.")
            settled[index] = Failure(reason, cause)
        return settled


class _LostError(Exception):
    """A worker can no longer reply. The text continues a sentence about the function."""


class _Worker:
    """The run's side of a worker: its guardian, and the process that calls functions."""

    def __init__(self, funcs: Mapping[str, bytes], kind: WorkerKind):
        self._kind = kind
        self._calls, theirs = socket.socketpair()
        self._guardian, its = socket.socketpair()
        with theirs, its:
            self.process = Popen(
                # -P leaves the script's folder off the path: its modules have common names.
                [sys.executable, "-P", str(_GUARDIAN), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=its.fileno(),
                start_new_session=True,
                env=os.environ | _NO_ACCELERATORS,
            )
        self._calls.setblocking(False)
        self._guardian.setblocking(False)
        self._code = "SIGKILL"
        self._token = b""
        self._unsent = memoryview(b"")
        self._received = bytearray()
        self.ready = False
        self.index: int | None = None
        self.calls = 0
        self.seconds: float | None = None
        self.deadline = math.inf
        setup = {"path": sys.path, "funcs": dict(funcs), "reader": kind.reader}
        self._ask(setup, seconds=_START_SECONDS)

    @property
    def is_idle(self) -> bool:
        """Whether the worker waits for a call."""
        return self.ready and self.index is None

    def has_died_idle(self) -> bool:
        """Returns whether a worker that owes no reply has ended, or sent anything."""
        return bool(self._received) or bool(_wait([self], 0.0))

    def give(
        self, name: str, index: int, arguments: Mapping[str, Any], seconds: float | None
    ) -> None:
        """Makes the worker call a function.

        Raises `UserError`, naming the column, for a value that another process cannot read.
        """
        self.index, self.calls = index, self.calls + 1
        pickled = {
            column: _pickled(column, values, self._kind) for column, values in arguments.items()
        }
        self._ask(name, index, pickled, seconds=seconds)

    def _ask(self, *message: Any, seconds: float | None) -> None:
        """Sends a message with a new token, by which its reply is recognized."""
        # Framing: a message is its length in 8 bytes, and then (token, ...) pickled. A reply is the
        # token, its length in 4 bytes, and then a literal of Python.
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        body = pickle.dumps((self._token, *message))
        self._unsent = memoryview(len(body).to_bytes(8, "big") + body)
        self.seconds = seconds
        self.deadline = math.inf if seconds is None else time.monotonic() + seconds

    def register(self, selector: selectors.BaseSelector) -> None:
        """Makes a selector wait for the worker's next event."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
        selector.register(self._calls, events)
        selector.register(self._guardian, selectors.EVENT_READ)

    def reply(self) -> dict[str, Any] | None:
        """Returns the worker's reply, after which it is idle, or `None` before the reply.

        Never waits. Raises `_LostError` if no reply will come.
        """
        ended = self._exchange()
        head, body = self._received[:_HEAD_BYTES], self._received[_HEAD_BYTES:]
        length = int.from_bytes(head[_TOKEN_BYTES:], "big")
        # The head may be incomplete. Bytes that differ from the token were written by the function.
        if not self._token.startswith(head[:_TOKEN_BYTES]) or length > _LONGEST_REPLY:
            raise _LostError("wrote to the descriptor through which its worker replies")
        if len(head) < _HEAD_BYTES or len(body) < length:
            if ended or self._ended_alone(0.0):
                raise _LostError(self._how_it_ended())
            return None
        reply: dict[str, Any] = ast.literal_eval(body[:length].decode())
        self._received = body[length:]
        if "cannot_load" in reply:
            raise UserError(
                f"a process cannot import the {self._kind.func}s, as that {reply['cannot_load']}: "
                f"with {self._kind.workers}, each must be in a module that Python can import."
            )
        if "unreadable" in reply:
            raise _unreadable(reply["unreadable"], reply["reason"], self._kind)
        self.ready, self.index, self.deadline = True, None, math.inf
        return reply

    def _exchange(self) -> bool:
        """Sends and receives without waiting; returns whether the worker closed its end."""
        try:
            while self._unsent:
                self._unsent = self._unsent[self._calls.send(self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent = memoryview(b"")
        try:
            while len(self._received) <= _HEAD_BYTES + _LONGEST_REPLY:
                received = self._calls.recv(1 << 16)
                if not received:
                    return True
                self._received += received
        except BlockingIOError:
            return False
        except OSError:
            return True
        return False

    def _ended_alone(self, seconds: float) -> bool:
        """Returns whether the guardian reports, within `seconds`, that the worker has ended."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._guardian, selectors.EVENT_READ)
            return bool(selector.select(seconds))

    def _how_it_ended(self) -> str:
        """Describes the unexpected end of a worker."""
        alone = self._ended_alone(_LAST_WORDS_SECONDS)
        code = self.end()
        if not alone or code == f"exit code {NO_REPLY}":
            return "closed the descriptor through which its worker replies"
        return f"lost its process ({code})"

    def kill(self) -> None:
        """Makes the guardian kill the worker and all processes that it started."""
        with contextlib.suppress(OSError):
            self._guardian.shutdown(socket.SHUT_WR)

    def end(self) -> str:
        """Kills the worker, waits until no process is left, and returns its exit code in words."""
        self.kill()
        self._calls.close()
        try:
            self.process.wait(_GUARDIAN_SECONDS)
        except TimeoutExpired:
            self.process.kill()
            self.process.wait()
        with self._guardian, contextlib.suppress(OSError):
            if code := self._guardian.recv(100):
                self._code = code.decode()
        return self._code


def _wait(workers: Sequence[_Worker], seconds: float | None) -> bool:
    """Waits for an event of any of the workers; returns whether one occurred in time."""
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            worker.register(selector)
        return bool(selector.select(seconds))


def _read(reply: Mapping[str, Any], read: Callable[[Any], _T | Failure]) -> _T | Failure:
    if "raised" in reply:
        return Failure(reply["raised"], WorkerError(reply["traceback"], reply["text"]))
    return read(reply["returned"])


def _pickled(column: str, values: Any, kind: WorkerKind) -> bytes:
    """Returns a column in pickled form; raises `UserError` if it cannot be pickled."""
    try:
        return pickle.dumps(values)
    except Exception as error:
        raise _unreadable(column, reason_of(error), kind) from error


def _unreadable(column: str, reason: str, kind: WorkerKind) -> UserError:
    return UserError(
        f"the column {column} cannot be sent to the processes of {kind.workers}, which {reason}: "
        f"leave it out of the problems, or set {kind.workers} to 0."
    )


def _by_reference(name: str, func: Callable[..., Any], kind: WorkerKind) -> bytes:
    """Returns a function pickled as module and name; raises `UserError` if it cannot be.

    Functions of the user's script are rejected: importing the script would train again in each
    worker.
    """
    fix = (
        f"with {kind.workers}, define it at the top level of a module that can be imported, such "
        f"as {kind.func.partition(' ')[0]}s.py beside your script."
    )
    try:
        pickled = pickle.dumps(func)
    except Exception as error:
        raise UserError(
            f"another process cannot import the {kind.func} {name} ({first_line(error)}): {fix}"
        ) from error
    if any(argument == "__main__" for _, argument, _ in pickletools.genops(pickled)):
        raise UserError(
            f"another process cannot import the {kind.func} {name}, which is in the script that "
            f"runs: {fix}"
        )
    return pickled
