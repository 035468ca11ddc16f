"""The plain reference: all logits at once."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from grpo_eqx.loss_backends.base import LossBackend, TokenStats, in_vocabulary
from grpo_eqx.loss_backends.softmax import product


class DenseLoss(LossBackend):
    """Holds the whole `[tokens, vocabulary]` array: for tests and tiny vocabularies."""

    def __call__(
        self,
        hidden: Float[Array, "*batch T H"],
        head: Float[Array, "V H"],
        ids: Int[Array, "*batch T"],
        temperature: float,
        mesh: jax.sharding.Mesh | None = None,
    ) -> TokenStats:
        scores = product("...th,vh->...tv", hidden, head.astype(hidden.dtype))
        highest = jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True))
        shifted = (scores - highest) / temperature
        logsums = jnp.log(jnp.exp(shifted).sum(axis=-1, keepdims=True))
        logprobs = shifted - logsums
        counted = in_vocabulary(ids, len(head))
        chosen = jnp.where(counted, ids, 0)[..., None]
        logps = jnp.take_along_axis(logprobs, chosen, axis=-1)[..., 0]
        entropies = -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)
        return TokenStats(logps, entropies, (highest / temperature + logsums)[..., 0]).where(
            counted
        )
