"""Clients of the endpoint: who asks, and what is sampled for them."""

import abc
import secrets
from collections.abc import Callable, Sequence

from grpo_eqx.data.trajectory import Address
from grpo_eqx.environments.chat_format import Message
from grpo_eqx.environments.endpoint.choice import Choice
from grpo_eqx.environments.endpoint.requests import RequestError, Wanted
from grpo_eqx.generation.open_session import Request

Encode = Callable[[], Sequence[Sequence[int]]]


class Turn(abc.ABC):
    """One completion that a client has asked for."""

    request: Request

    @abc.abstractmethod
    def end(self, choice: Choice, wanted: Wanted, message: Message | None) -> None:
        """Takes the whole completion, which the client now gets.

        **Arguments:**

        - `choice`: the completion.
        - `wanted`: the request that it answers.
        - `message`: the completion as chat templates read it; `None` where requests have texts.
        """

    @abc.abstractmethod
    def drop(self) -> None:
        """Forgets a completion that the client does not get, as where it has hung up."""


class Client(abc.ABC):
    """One whose requests belong together."""

    @abc.abstractmethod
    def begin(self, wanted: Wanted, encode: Encode) -> list[Turn]:
        """Begins `wanted.n` completions of each prompt, those of a prompt one after the other.

        **Arguments:**

        - `wanted`: the request.
        - `encode`: returns its prompts, as the tokenizer writes them.

        Raises `RequestError` for requests that cannot be answered.
        """


class _SingleTurn(Turn):
    """A completion that nothing follows."""

    def __init__(self, request: Request):
        self.request = request

    def end(self, choice: Choice, wanted: Wanted, message: Message | None) -> None: ...

    def drop(self) -> None: ...


class Guest(Client):
    """Anyone: each request stands alone, with the sampling that it asks for."""

    def __init__(self, max_length: int):
        """**Arguments:**

        - `max_length`: limit on the tokens of a request, those that are drawn included.
        """
        self._max_length = max_length

    def begin(self, wanted: Wanted, encode: Encode) -> list[Turn]:
        prompts = encode()
        for ids in prompts:
            _check_room(wanted, len(ids), self._max_length)
        seed = secrets.randbits(31) if wanted.seed is None else wanted.seed % 2**31
        return [
            _SingleTurn(
                Request(
                    ids=ids,
                    address=Address(seed, p, n),
                    start=len(ids),
                    max_tokens=wanted.max_tokens or self._max_length - len(ids),
                    sampling=wanted.sampling,
                )
            )
            for p, ids in enumerate(prompts)
            for n in range(wanted.n)
        ]


def _check_room(wanted: Wanted, length: int, most: int) -> None:
    """Raises `RequestError` for a prompt that leaves no room for its completion."""
    if length + (wanted.max_tokens or 1) > most:
        raise RequestError(
            400,
            f"the prompt has {length} tokens, {wanted.max_tokens or 1} may follow, and this server "
            f"has room for {most}: send fewer, or lower max_tokens",
            "messages" if wanted.messages is not None else "prompt",
            "context_length_exceeded",
        )
