"""A server: which engine it is, and which weights it has."""

import asyncio
import dataclasses
from collections.abc import Sequence

from grpo_eqx.common.errors import RunError, UserError
from grpo_eqx.generation.remote.connection import (
    AnswerError,
    Connection,
    FailedError,
    RefusedError,
)
from grpo_eqx.generation.remote.engine import Answer, Asked, Engine
from grpo_eqx.generation.remote.sglang import SGLang
from grpo_eqx.generation.remote.vllm import VLLM

_ENGINES: Sequence[type[Engine]] = (SGLang, VLLM)
_LOADS = 2
"""Times that a server is asked to load the same weights."""


@dataclasses.dataclass(frozen=True, eq=False)
class Weights:
    """Weights that servers are to have; each batch of completions has an object of its own."""

    folder: str
    version: str


class Server:
    """A server that completes requests with the weights that it is to have."""

    def __init__(self, connection: Connection):
        self.address, self._connection = connection.address, connection
        self._engine: Engine | None = None
        self._weights: Weights | None = None
        """Weights that it has, or is about to have, as long as nothing speaks against it."""
        self._prepared: asyncio.Task[Engine] | None = None
        """Task that all requests for these weights wait for."""
        self._lock = asyncio.Lock()

    async def complete(self, asked: Asked, weights: Weights) -> Answer:
        """Returns a completion by the weights, which the server loads first if it has others.

        Raises `FailedError` or `AnswerError` for what may succeed later, `RunError` for a request
        that is refused or weights that are not loaded, and `UserError` for a server that cannot
        serve the run.
        """
        if self._weights is not weights or self._prepared is None:
            self._weights, self._prepared = weights, asyncio.create_task(self._prepare(weights))
        try:
            engine = await asyncio.shield(self._prepared)
            if (fault := engine.fault(asked.sampling)) is not None:
                raise UserError(f"{self.address}: {fault}.")
            path, body = engine.request(asked)
            answer = engine.read(await self._connection.post(path, body))
            if answer.version not in (None, weights.version):
                raise AnswerError(
                    f"the answer is of the weights {answer.version}, not {weights.version}"
                )
            return answer
        except (FailedError, AnswerError):
            self._weights = None  # it may have started again, with others
            raise
        except RefusedError as error:
            raise RunError(f"{self.address} refuses a request with {error}.") from error

    async def _prepare(self, weights: Weights) -> Engine:
        """Returns the engine of the server, once it has the weights."""
        async with self._lock:
            self._engine = self._engine or await self._find_engine()
            await self._load(self._engine, weights)
            return self._engine

    async def _find_engine(self) -> Engine:
        for kind in _ENGINES:
            if (engine := await kind.find(self._connection)) is not None:
                return engine
        raise UserError(
            f"{self.address} is neither a vLLM nor an SGLang server: check the address."
        )

    async def _load(self, engine: Engine, weights: Weights) -> None:
        """Has the server load weights, and checks that it has them."""
        found, reason = await engine.version(self._connection), ""
        for _ in range(_LOADS):
            if found == weights.version:
                return
            try:
                await engine.load(self._connection, weights.folder, weights.version)
            except (RefusedError, FailedError) as error:
                reason = f" ({error})"
            found = await engine.version(self._connection)
        if found != weights.version:
            raise RunError(
                f"{self.address} has the weights {found}, and did not load {weights.version} from "
                f"{weights.folder}{reason}: it must serve the run's model, and see that folder "
                f"under the same path."
            )
