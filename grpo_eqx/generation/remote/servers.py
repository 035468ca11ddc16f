"""Servers that share the requests of a run."""

import asyncio
import concurrent.futures
import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

import httpx

from grpo_eqx.common.errors import RunError, UserError, shown
from grpo_eqx.common.event_loop import LoopThread
from grpo_eqx.common.process_state import warn
from grpo_eqx.generation.remote.connection import (
    API_KEY,
    AnswerError,
    Connection,
    FailedError,
    LateError,
)
from grpo_eqx.generation.remote.engine import Answer, Asked
from grpo_eqx.generation.remote.server import Server, Weights

_TO_CONNECT = 10.0
"""Seconds in which a server accepts a connection."""
_PAUSE = 0.5
"""Seconds after a server's first failure before it is asked again; they double with each failure in
a row."""
_MOST_FAILURES = 8
"""Failures in a row after which a server is left out, about a minute after the first; and failures
of one request, for each server, after which the run ends."""
_LATE_AS = 4
"""Failures as which a late answer counts: to wait for it takes long enough."""
_MOST_DOUBLINGS = 6
_MOST_FAULTS = 3
"""Answers to one request that are not what was asked for, before the run ends."""
_MOST_UNDER_WAY = 256
"""Requests under way for each server. Others wait here: each takes a socket."""


@dataclasses.dataclass(eq=False)
class _Member:
    """A server with what decides whether it is asked."""

    server: Server
    under_way: int = 0
    failures: int = 0
    """Failures in a row. Those of requests that were under way together count once."""
    failed_at: float = 0.0
    retry_at: float = 0.0
    """Time before which it is not asked."""
    reason: str = ""
    """Why it failed last."""
    has_warned: bool = False
    """Whether the user has been told of an answer that was late, or not what was asked for."""

    @property
    def is_left_out(self) -> bool:
        return self.failures >= _MOST_FAILURES


class Servers:
    """Servers that each take the next request when they have the fewest under way."""

    def __init__(self, addresses: Sequence[str], timeout: float):
        """**Arguments:**

        - `addresses`: addresses, as in `http://host:8000`.
        - `timeout`: seconds in which a request is answered, or weights are loaded.

        Raises `UserError` for addresses that cannot be those of servers.
        """
        addresses = [_checked(each) for each in addresses]
        if not addresses or len({*addresses}) < len(addresses):
            raise UserError(f"the servers are {shown(addresses)}: give each address once.")
        key = os.environ.get(API_KEY)
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(timeout, connect=min(_TO_CONNECT, timeout), pool=None),
            limits=httpx.Limits(max_connections=None),
            headers={"Authorization": f"Bearer {key}"} if key else {},
        )
        self._members = [_Member(Server(Connection(each, self._client))) for each in addresses]
        self._room = asyncio.Semaphore(_MOST_UNDER_WAY * len(addresses))
        self._under_way = set[concurrent.futures.Future[Answer]]()
        self._loop = LoopThread("remote_sampler", lambda error: None)  # futures have all errors

    def ask(
        self, asked: Asked, weights: Weights, checked: Callable[[Answer], Answer]
    ) -> concurrent.futures.Future[Answer]:
        """Asks for a completion, and does not wait for it.

        **Arguments:**

        - `asked`: the completion.
        - `weights`: the weights that draw it.
        - `checked`: returns what the completion is; raises `AnswerError` if it is not whole.

        The result raises `RunError` once no server is left, or where answers are not whole, and
        `UserError` for a server that cannot serve the run.
        """
        future = self._loop.run(self._complete(asked, weights, checked))
        self._under_way.add(future)
        future.add_done_callback(self._under_way.discard)
        return future

    def wait(self) -> None:
        """Waits until all requests have ended."""
        concurrent.futures.wait(list(self._under_way))

    def close(self) -> None:
        """Ends all requests and connections."""
        for future in list(self._under_way):
            future.cancel()
        self.wait()
        self._loop.run(self._client.aclose()).result()
        self._loop.close()

    async def _complete(
        self, asked: Asked, weights: Weights, checked: Callable[[Answer], Answer]
    ) -> Answer:
        faults, failures, before = 0, 0, None
        async with self._room:
            while True:
                before = member = await self._next(before)
                started = time.monotonic()
                member.under_way += 1
                try:
                    answer = checked(await member.server.complete(asked, weights))
                    if not member.is_left_out:
                        member.failures = 0
                    return answer
                except FailedError as error:
                    failures += 1
                    self._note_failure(member, started, error, failures)
                except AnswerError as error:
                    faults += 1
                    _note_fault(member, faults, error)
                finally:
                    member.under_way -= 1
                if (doublings := failures - len(self._members)) > 0:
                    await asyncio.sleep(_PAUSE * 2 ** min(doublings, _MOST_DOUBLINGS))

    async def _next(self, before: _Member | None) -> _Member:
        """Returns the server to ask, another than `before` if there is one.

        Waits while all of them have failed a moment ago.
        """
        while True:
            left = [each for each in self._members if not each.is_left_out]
            if not left:
                reasons = "; ".join(f"{x.server.address}: {x.reason}" for x in self._members)
                raise RunError(
                    f"no server is left to sample ({reasons}): start them again, and resume the "
                    f"run."
                )
            now = time.monotonic()
            ready = [each for each in left if each.retry_at <= now]
            if ready:
                others = [each for each in ready if each is not before]
                return min(others or ready, key=lambda each: each.under_way)
            await asyncio.sleep(min(each.retry_at for each in left) - now)

    def _note_failure(
        self, member: _Member, started: float, error: FailedError, number: int
    ) -> None:
        """Notes that a request failed, as its failure of a number; raises `RunError` after many."""
        if number == _MOST_FAILURES * len(self._members):
            raise RunError(
                f"a request failed {number} times, last at {member.server.address} ({error}): look "
                f"at the servers' logs, and resume the run."
            ) from error
        if isinstance(error, LateError):
            _warn_once(member, error)
        if member.is_left_out or started < member.failed_at:
            return  # one of several that were under way
        member.failed_at = time.monotonic()
        member.retry_at = member.failed_at + _PAUSE * 2**member.failures
        member.failures += _LATE_AS if isinstance(error, LateError) else 1
        member.reason = str(error)
        if member.is_left_out and not all(each.is_left_out for each in self._members):
            warn(
                f"{member.server.address} fails again and again ({member.reason}): the run goes on "
                f"without it"
            )


def _note_fault(member: _Member, number: int, error: AnswerError) -> None:
    """Notes an answer that is not what was asked for; raises `RunError` after several."""
    if number == _MOST_FAULTS:
        raise RunError(
            f"{number} answers to one request are not whole, the last by {member.server.address} "
            f"({error}): look at the servers' versions and logs."
        ) from error
    _warn_once(member, error)


def _warn_once(member: _Member, error: Exception) -> None:
    if not member.has_warned:
        member.has_warned = True
        warn(f"{member.server.address}: {error}; the request is sent again")


def _checked(address: str) -> str:
    """Returns an address without what may follow the port; raises `UserError` if it is none."""
    try:
        parts = urlsplit(address)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname)
        _ = parts.port
    except ValueError:
        is_address = False
    if not is_address or parts.path.strip("/") or parts.query:
        raise UserError(
            f"{shown(address)} is not the address of a server: give one such as http://host:8000."
        )
    return f"{parts.scheme}://{parts.netloc}"
