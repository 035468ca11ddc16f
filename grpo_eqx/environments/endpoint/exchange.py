"""Requests of a server's thread, and the tokens that another thread samples for them."""

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncGenerator, Callable
from typing import Any

import jax

from grpo_eqx.data.trajectory import Address
from grpo_eqx.distributed.exchange import from_main
from grpo_eqx.generation.open_session import Drawn, OpenSession, Request
from grpo_eqx.generation.sampling import Sampling

_PAUSE = 0.2
"""Seconds after which an idle thread looks whether it is to end."""

_NOTHING = -1
"""Number of no request."""


class OverloadedError(Exception):
    """Too many requests are under way."""


class EndedError(Exception):
    """The session has ended, and completes nothing more."""


class Exchange:
    """Hands requests to a session, which runs in one thread, and tokens back to their askers.

    `complete` is called in the server's event loop, `run` in the session's thread.
    """

    def __init__(self, session: OpenSession, most_waiting: int = 4096):
        """**Arguments:**

        - `session`: completes requests.
        - `most_waiting`: requests that may be under way at once.
        """
        self.session, self._most_waiting = session, most_waiting
        self._inbox: queue.SimpleQueue[_Asked | int] = queue.SimpleQueue()
        """Requests, and the numbers of those that are to end."""
        self._numbers: dict[int, int] = {}
        """Number in the session of each request under way, by its own."""
        self._asked: dict[int, _Asked] = {}
        """Requests under way by their number in the session."""
        self._next = 0
        self.num_open = 0
        """Requests under way."""
        self._ended = threading.Event()

    async def complete(self, request: Request) -> AsyncGenerator[Drawn, None]:
        """Yields the tokens of a request as they come; ends it when it is closed.

        Raises `OverloadedError` if too many are under way, and `EndedError` once `run` has ended.
        """
        if self.num_open >= self._most_waiting:
            raise OverloadedError
        number, self._next = self._next, self._next + 1
        drawn: asyncio.Queue[Drawn | EndedError] = asyncio.Queue()
        self.num_open += 1
        has_ended = False
        self._inbox.put(_Asked(number, request, asyncio.get_running_loop(), drawn))
        try:
            if self._ended.is_set():
                raise EndedError
            while not has_ended:
                each = await drawn.get()
                if isinstance(each, EndedError):
                    has_ended = True
                    raise each
                has_ended = each.finish_reason is not None
                yield each
        finally:
            self.num_open -= 1
            if not has_ended:
                self._inbox.put(number)

    def wake(self) -> None:
        """Has `run` ask at once whether it is to end."""
        self._inbox.put(_NOTHING)

    def run(self, is_to_end: Callable[[], bool]) -> None:
        """Completes requests until it is to end, which is asked between two of its steps.

        Those that are under way then get an `EndedError`, also where the session fails.
        """
        try:
            while True:
                try:
                    if is_to_end():
                        break
                    asked, dropped = self._arrived()
                except BaseException:
                    self._tell(None)  # else the others would wait
                    raise
                self._tell([dropped, [_facts_of(each.request) for each in asked]])
                for number in dropped:
                    self.session.drop(number)
                for each in asked:
                    number = self.session.take(each.request)
                    self._numbers[each.number], self._asked[number] = number, each
                for drawn in self.session.step():
                    self._hand(drawn)
            self._tell(None)
        finally:
            self._ended.set()
            self._refuse()

    def _tell(self, what: Any) -> None:
        """Tells the other processes what to sample; `None`: nothing more."""
        if jax.process_count() > 1:
            from_main(what)

    def _arrived(self) -> tuple[list["_Asked"], list[int]]:
        """Returns new requests, and the numbers in the session of those that are to end.

        Waits a while for something if nothing is under way.
        """
        asked, dropped = dict[int, _Asked](), list[int]()
        with contextlib.suppress(queue.Empty):
            arrived = self._inbox.get(timeout=_PAUSE if self.session.is_idle else 0.0)
            while True:
                if isinstance(arrived, _Asked):
                    asked[arrived.number] = arrived
                elif arrived not in asked:
                    number = self._numbers.pop(arrived, None)
                    if number is not None:
                        del self._asked[number]
                        dropped.append(number)
                else:
                    del asked[arrived]
                arrived = self._inbox.get_nowait()
        return list(asked.values()), dropped

    def _hand(self, drawn: Drawn) -> None:
        asked = self._asked.get(drawn.number)
        if asked is None:
            return
        if drawn.finish_reason is not None:
            del self._asked[drawn.number], self._numbers[asked.number]
        asked.send(drawn)

    def _refuse(self) -> None:
        """Ends the requests that are under way."""
        waiting = list(self._asked.values())
        while not self._inbox.empty():
            each = self._inbox.get()
            waiting += [each] if isinstance(each, _Asked) else []
        for asked in waiting:
            asked.send(EndedError())
        self._asked, self._numbers = {}, {}


def follow(session: OpenSession, sampling: Sampling) -> None:
    """Samples with the first process until its `Exchange.run` ends.

    **Arguments:**

    - `session`: the session of this process.
    - `sampling`: how the tokens of all requests are drawn.
    """
    while (told := from_main(None)) is not None:
        dropped, asked = told
        for number in dropped:
            session.drop(number)
        for ids, address, start, max_tokens in asked:
            session.take(Request(ids, Address(*address), start, max_tokens, sampling))
        session.step()


def _facts_of(request: Request) -> tuple[list[int], Address, int, int]:
    """Returns what other processes are told of a request."""
    return list(map(int, request.ids)), request.address, request.start, request.max_tokens


class _Asked:
    """A request, and where its tokens go."""

    def __init__(
        self,
        number: int,
        request: Request,
        loop: asyncio.AbstractEventLoop,
        drawn: "asyncio.Queue[Any]",
    ):
        self.number, self.request, self._loop, self._drawn = number, request, loop, drawn

    def send(self, drawn: Drawn | EndedError) -> None:
        try:
            self._loop.call_soon_threadsafe(self._drawn.put_nowait, drawn)
        except RuntimeError:
            return  # the server has ended, and its loop with it
