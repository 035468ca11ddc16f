"""The plain reference: all logits at once."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from grpo_eqx.loss_backends.base import LossBackend, TokenStats


class DenseLoss(LossBackend):
    """Holds the whole `[tokens, vocabulary]` array: for tests and tiny vocabularies."""

    def __call__(
        self,
        hidden: Float[Array, "*batch T H"],
        head: Float[Array, "V H"],
        ids: Int[Array, "*batch T"],
        temperature: float,
    ) -> TokenStats:
        return stats_of_logits(scaled_logits(hidden, head, temperature), ids)


def scaled_logits(
    hidden: Float[Array, "*batch T H"], head: Float[Array, "V H"], temperature: float
) -> Float[Array, "*batch T V"]:
    """Float32 logits divided by the temperature; the product runs in the dtype of `hidden`."""
    logits = jnp.einsum(
        "...th,vh->...tv", hidden, head.astype(hidden.dtype), preferred_element_type=jnp.float32
    )
    return logits / temperature


def stats_of_logits(logits: Float[Array, "*batch T V"], ids: Int[Array, "*batch T"]) -> TokenStats:
    """`TokenStats` of float32 logits that already carry their temperature."""
    # Everything relative to the largest logit: where logits are in the hundreds, differences of
    # the logits themselves, or of their logsumexp, have lost the digits that count.
    highest = jax.lax.stop_gradient(logits.max(axis=-1, keepdims=True))
    shifted = logits - highest
    logsums = jnp.log(jnp.exp(shifted).sum(axis=-1, keepdims=True))
    logprobs = shifted - logsums
    logps = jnp.take_along_axis(logprobs, ids[..., None], axis=-1)[..., 0]
    entropies = -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)
    return TokenStats(logps, entropies, (highest + logsums)[..., 0])
