"""Completions that servers sample, in turns between which the host says what they read."""

import concurrent.futures
import contextlib
import dataclasses
import queue
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from grpo_eqx.common.event_loop import GRACE
from grpo_eqx.data.trajectory import FinishReason, Trajectory
from grpo_eqx.distributed.exchange import from_main, raise_on_all_hosts
from grpo_eqx.generation.pending import Ahead
from grpo_eqx.generation.remote.engine import Answer
from grpo_eqx.generation.sampler import PendingSamples, Responder, Sampled, SamplingCounts

_BETWEEN_REPLIES = 0.02
"""Seconds to wait for a server before looking for replies, where completions wait for one."""

Ask = Callable[[Trajectory], concurrent.futures.Future[Answer]]
"""Asks for the next turn of a completion."""


class RemoteSession(PendingSamples):
    """Completions of servers: where a turn has ended, a responder says what follows.

    The first process asks the servers; all processes get the same completions.
    """

    def __init__(
        self,
        ask: Ask | None,
        trajectories: Sequence[Trajectory],
        max_completion_length: int,
        version: int,
        responder: Responder | None,
    ):
        """**Arguments:**

        - `ask`: asks for turns; `None` in processes other than the first.
        - `trajectories`: the completions, with the tokens that they begin with. Those with a
          finish reason are returned as they are.
        - `max_completion_length`: limit on the tokens of a completion.
        - `version`: version of the weights.
        - `responder`: says what follows a turn; by default, a completion has one turn.
        """
        self._ask, self._trajectories = ask, list(trajectories)
        self._most_tokens, self._version, self._responder = (
            max_completion_length, version, responder,
        )  # fmt: skip
        self._ended: queue.SimpleQueue[int] = queue.SimpleQueue()
        """Completions whose request has ended."""
        self._futures: dict[int, concurrent.futures.Future[Answer]] = {}
        self._under_way: set[int] = set()
        """Completions that a server works on."""
        self._asked: set[int] = set()
        """Completions that wait for a reply."""
        self._num_drawn = 0
        self._sampled: Sampled | None = None
        for number, each in enumerate(trajectories):
            if each.finish_reason is None:
                self._start(number)

    def result(self) -> Sampled:
        if self._sampled is None:
            try:
                while self._under_way or self._asked:
                    self._take_answers()
                    self._take_replies()
            except BaseException:
                self.cancel()
                raise
            counts = SamplingCounts(tokens=self._num_drawn)
            self._sampled = Sampled(self._trajectories, counts)
        return self._sampled

    def in_background(self) -> PendingSamples:
        # Servers work on their own until a completion needs a reply.
        return self if self._responder is None else Ahead(self)

    def wait(self) -> None:
        concurrent.futures.wait(list(self._futures.values()))

    def cancel(self) -> None:
        """Ends the requests that are under way."""
        for future in self._futures.values():
            future.cancel()

    def _start(self, number: int) -> None:
        """Asks for the next turn of a completion."""
        self._under_way.add(number)
        if self._ask is not None:
            self._futures[number] = future = self._ask(self._trajectories[number])
            future.add_done_callback(lambda _: self._ended.put(number))

    def _take_answers(self) -> None:
        """Takes the turns that have ended, and hands them to the responder."""
        answers = raise_on_all_hosts(self._answers)
        if jax.process_count() > 1:
            answers = from_main(answers)
        for number, ids, logps, reason in answers:
            self._under_way.remove(number)
            self._num_drawn += len(ids)
            trajectory = self._trajectories[number].extended(
                ids, np.array(logps, np.float32), version=self._version
            )
            self._trajectories[number] = trajectory
            if self._responder is None or reason == "length":
                self._finish(number, reason)
            else:
                self._asked.add(number)
                self._responder.take(number, trajectory)

    def _answers(self) -> list[tuple[int, list[int], list[float], Any]]:
        """Returns the turns that have ended, after waiting for the first."""
        if not self._futures:
            return []
        numbers = []
        with contextlib.suppress(queue.Empty):
            numbers.append(self._ended.get(timeout=_BETWEEN_REPLIES if self._asked else GRACE))
            while True:
                numbers.append(self._ended.get_nowait())
        answers = [(number, self._futures.pop(number).result()) for number in numbers]
        return [(number, x.ids, x.logps, x.finish_reason) for number, x in answers]

    def _take_replies(self) -> None:
        """Takes the replies that are there; waits for one where nothing else is left to do."""
        if self._responder is None or not self._asked:
            return
        for number, tokens in self._responder.replies(wait=not self._under_way):
            self._asked.remove(number)
            trajectory = self._trajectories[number]
            if tokens is None:
                self._finish(number, "stop")
            elif len(tokens) >= self._most_tokens - len(trajectory):
                self._finish(number, "length")  # nothing could follow
            else:
                self._trajectories[number] = trajectory.extended(tokens, version=self._version)
                self._start(number)

    def _finish(self, number: int, reason: FinishReason) -> None:
        self._trajectories[number] = dataclasses.replace(
            self._trajectories[number], finish_reason=reason
        )
