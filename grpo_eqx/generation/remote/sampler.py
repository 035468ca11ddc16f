"""The sampler on servers of other engines."""

import concurrent.futures
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import final

import jax
import jax.numpy as jnp
import numpy as np

from grpo_eqx.data.prompts import Prompt
from grpo_eqx.data.trajectory import Trajectory
from grpo_eqx.distributed.startup import is_main
from grpo_eqx.generation.remote.answers import Ends
from grpo_eqx.generation.remote.engine import Answer, Asked
from grpo_eqx.generation.remote.seeds import request_seed
from grpo_eqx.generation.remote.server import Weights
from grpo_eqx.generation.remote.servers import Servers
from grpo_eqx.generation.remote.session import RemoteSession
from grpo_eqx.generation.remote.weights_folder import WeightsFolder
from grpo_eqx.generation.sampler import PendingSamples, Responder, Sampler, Until
from grpo_eqx.generation.sampling import Sampling
from grpo_eqx.generation.stopping import Stopping
from grpo_eqx.models.interface import CausalLM


@dataclasses.dataclass(frozen=True, kw_only=True)
class RemoteOptions:
    """Options of `RemoteSampler`."""

    sampling: Sampling
    """Sampling in training."""
    max_completion_length: int
    stopping: Stopping
    """Ends of completions, as `LocalSampler` has them."""
    end_ids: Sequence[int]
    """Tokens that end a completion."""
    stop_strings: Sequence[str] = ()
    """Strings that end it."""
    seed: int
    dtype: jax.typing.DTypeLike = jnp.bfloat16
    """Dtype of the files of weights. A server that quantizes does so as it loads them."""
    timeout: float = 600.0
    """Seconds in which a server completes a request, or loads weights."""


@final
class RemoteSampler(Sampler):
    """Sampler on vLLM and SGLang servers, which load the weights from a shared folder.

    vLLM servers are started with the environment variable `VLLM_SERVER_DEV_MODE=1`, and with
    `--logprobs-mode processed_logprobs` where the temperature is not 1 or tokens are truncated.
    SGLang servers are started without `SGLANG_RETURN_ORIGINAL_LOGPROB`, and honor seeds with
    `--enable-deterministic-inference`. Servers get the API key in the environment variable
    `GRPO_EQX_SAMPLER_API_KEY`.
    """

    def __init__(self, addresses: Sequence[str], folder: str | Path, options: RemoteOptions):
        """**Arguments:**

        - `addresses`: addresses of the servers, as in `http://host:8000`.
        - `folder`: folder for the weights, which the servers see under the same path.
        - `options`: the options.

        Raises `UserError` for addresses that cannot be those of servers.
        """
        self.options = options
        servers = Servers(addresses, options.timeout)
        self._servers = servers if is_main() else None
        self._folder = WeightsFolder(folder, options.dtype)
        self._ends = Ends(options.stopping)
        self._model: tuple[CausalLM, int] | None = None
        self._weights: Weights | None = None
        """The weights as they are in the folder."""

    def set_weights(self, model: CausalLM, version: int) -> None:
        if self._model is None or self._model[0] is not model or self._model[1] != version:
            self._model, self._weights = (model, version), None

    def submit(
        self,
        trajectories: Sequence[Trajectory],
        sampling: Sampling | None = None,
        *,
        problems: Sequence[Prompt | None] | None = None,
        prompt_width: int | None = None,
        responder: Responder | None = None,
        until: Until | None = None,
    ) -> PendingSamples:
        assert self._model is not None, "set_weights comes first"
        assert until is None, "servers complete what they have begun"
        model, version = self._model
        if self._weights is None:
            if self._servers is not None:
                self._servers.wait()  # nothing loads or uses the weights before
            self._weights = self._folder.write(model, version)
        weights = dataclasses.replace(self._weights)  # for which servers are checked anew
        sampling = sampling or self.options.sampling

        def ask(trajectory: Trajectory) -> concurrent.futures.Future[Answer]:
            return self._ask(trajectory, sampling, weights)

        return RemoteSession(
            None if self._servers is None else ask, self._real(trajectories, problems),
            self.options.max_completion_length, version, responder,
        )  # fmt: skip

    def close(self) -> None:
        """Ends all requests, and removes the weights from the folder."""
        if self._servers is not None:
            self._servers.close()
        self._folder.clear()

    def _real(
        self, trajectories: Sequence[Trajectory], problems: Sequence[Prompt | None] | None
    ) -> list[Trajectory]:
        """Returns trajectories of which those that fill the batch up have ended."""
        if problems is None:
            return list(trajectories)
        group = len(trajectories) // len(problems)
        end = np.array(self.options.end_ids[:1], np.int32)
        return [
            each.completed(end) if problems[n // group] is None else each
            for n, each in enumerate(trajectories)
        ]

    def _ask(
        self, trajectory: Trajectory, sampling: Sampling, weights: Weights
    ) -> concurrent.futures.Future[Answer]:
        """Asks for the tokens that follow a completion so far."""
        assert self._servers is not None
        options = self.options
        asked = Asked(
            ids=[*trajectory.prompt_ids, *trajectory.ids.tolist()],
            max_tokens=options.max_completion_length - len(trajectory),
            sampling=sampling,
            end_ids=options.end_ids,
            stop_strings=options.stop_strings,
            seed=request_seed(options.seed, trajectory.address, len(trajectory)),
        )
        return self._servers.ask(asked, weights, lambda each: self._ends.checked(asked, each))
