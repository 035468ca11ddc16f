"""Plain reference backend: all logits at once."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from grpo_eqx.common.shapes import Number
from grpo_eqx.loss_backends.base import LossBackend, TokenStats
from grpo_eqx.models.product import product
from grpo_eqx.models.softcap import soft_capped


class DenseLoss(LossBackend):
    """Backend with the whole `[tokens, vocabulary]` array, for tests and tiny vocabularies."""

    def token_stats(
        self,
        hidden: Float[Array, "*batch T H"],
        head: Float[Array, "V H"],
        ids: Int[Array, "*batch T"],
        temperature: Number,
        mesh: jax.sharding.Mesh | None,
        softcap: float | None,
    ) -> TokenStats:
        scores = product("...th,vh->...tv", hidden, head.astype(hidden.dtype))
        scores = soft_capped(scores, softcap)
        highest = jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True))
        shifted = (scores - highest) * (1 / temperature)
        logsums = jnp.log(jnp.exp(shifted).sum(axis=-1, keepdims=True))
        logprobs = shifted - logsums
        logps = jnp.take_along_axis(logprobs, ids[..., None], axis=-1)[..., 0]
        entropies = -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)
        return TokenStats(logps, entropies, (highest * (1 / temperature) + logsums)[..., 0])
