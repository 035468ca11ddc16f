"""Requests to servers of one kind, and how their answers are read."""

import abc
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from grpo_eqx.common.errors import shown
from grpo_eqx.generation.remote.connection import AnswerError, Connection
from grpo_eqx.generation.sampling import Sampling


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """A completion that a server is asked for."""

    ids: Sequence[int]
    """Tokens to continue: prompt, earlier turns, replies."""
    max_tokens: int
    """Limit of the tokens to draw, at least 1."""
    sampling: Sampling
    """How they are drawn."""
    end_ids: Sequence[int]
    """Tokens that end the completion, as its last one."""
    stop_strings: Sequence[str] = ()
    """Strings in its text that end it."""
    seed: int
    """Seed of the draws."""


class Answer(NamedTuple):
    """A completion as a server returns it."""

    ids: list[int]
    """The tokens, with the one that ends it."""
    logps: list[float]
    """Log-prob of each."""
    finish_reason: str
    """`stop`, `length`, or another by which the server says that it is not whole."""
    version: str | None = None
    """Version of the weights, where the answer has it."""


class Engine(abc.ABC):
    """Routes and bodies of one kind of server."""

    @classmethod
    @abc.abstractmethod
    async def find(cls, connection: Connection) -> "Engine | None":
        """Returns the engine of a server; `None` for one of another kind."""

    @abc.abstractmethod
    def fault(self, sampling: Sampling) -> str | None:
        """Returns why its log-probs are not those of the distribution that tokens are drawn from.

        The reason has the fix. `None` where they are.
        """

    @abc.abstractmethod
    def request(self, asked: Asked) -> tuple[str, dict[str, Any]]:
        """Returns path and body of the request for a completion."""

    @abc.abstractmethod
    def read(self, body: Any) -> Answer:
        """Reads the body of an answer; raises `AnswerError` for what is no completion."""

    @abc.abstractmethod
    async def load(self, connection: Connection, folder: str, version: str) -> None:
        """Has the server load weights.

        **Arguments:**

        - `connection`: the server.
        - `folder`: folder with safetensors, as the server sees it.
        - `version`: version that the server then says that it has.
        """

    @abc.abstractmethod
    async def version(self, connection: Connection) -> str:
        """Returns the version of the weights that the server says that it has."""


def field(body: Any, *path: str | int) -> Any:
    """Returns what a body has at a path of names and indices; raises `AnswerError` without it."""
    found = body
    for name in path:
        holds = isinstance(found, Mapping if isinstance(name, str) else Sequence)
        try:
            found = found[name] if holds else None
        except (KeyError, IndexError):
            found = None
        if found is None:
            raise AnswerError(f"the answer has no {'.'.join(map(str, path))}")
    return found


def read_tokens(ids: Any, logps: Any, count: Any) -> tuple[list[int], list[float]]:
    """Reads tokens and their log-probs; raises `AnswerError` unless each token has one.

    **Arguments:**

    - `ids`, `logps`: the tokens and the log-probs.
    - `count`: number of tokens that the server says that it drew.
    """
    if not isinstance(ids, list) or not all(type(x) is int for x in ids):
        raise AnswerError(f"the answer has tokens that are not integers: {shown(ids)}")
    if not isinstance(logps, list) or not all(
        isinstance(x, int | float) and math.isfinite(x) for x in logps
    ):
        raise AnswerError(f"the answer has log-probs that are not finite numbers: {shown(logps)}")
    if not len(ids) == len(logps) == count:
        raise AnswerError(
            f"the answer has {len(ids)} tokens and {len(logps)} log-probs of {shown(count)} tokens "
            f"that were drawn"
        )
    return ids, [float(x) for x in logps]


def is_truncated(sampling: Sampling) -> bool:
    """Returns whether some tokens cannot be drawn."""
    return any(x is not None for x in (sampling.top_k, sampling.top_p, sampling.min_p))


def sampling_fields(sampling: Sampling) -> dict[str, Any]:
    """Returns the fields that all engines share.

    Each is there, since servers otherwise take it from the `generation_config.json` of a model.
    """
    return {
        "temperature": 0.0 if sampling.temperature is None else float(sampling.temperature),
        "top_k": -1 if sampling.top_k is None else sampling.top_k,
        "top_p": 1.0 if sampling.top_p is None else float(sampling.top_p),
        "min_p": 0.0 if sampling.min_p is None else float(sampling.min_p),
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }
