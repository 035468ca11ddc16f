"""`TokenStats` of existing logits."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from grpo_eqx.loss_backends.base import TokenStats, checked_positive, in_vocabulary
from grpo_eqx.loss_backends.softmax import Partial, ScoreGradient


def stats_of_logits(
    logits: Float[Array, "*batch T V"], ids: Int[Array, "*batch T"], temperature: float
) -> TokenStats:
    """Returns statistics of `ids` under `softmax(logits / temperature)`, as a `LossBackend` does.

    They are computed in float32 from logits of any dtype. The backward pass keeps the logits and
    writes their gradient in their dtype; on TPUs, whose compiler fuses the arithmetic, no other
    array of that size exists. Raises `UserError` for a temperature that is not a positive number.
    """
    return _stats(logits, ids, checked_positive("temperature", temperature))


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _stats(
    logits: Float[Array, "*batch T V"], ids: Int[Array, "*batch T"], temperature: float
) -> TokenStats:
    return _forward(logits, ids, temperature)[0]


def _forward(
    logits: Float[Array, "*batch T V"], ids: Int[Array, "*batch T"], temperature: float
) -> tuple[TokenStats, tuple[Array, Array, Partial]]:
    own = _own(logits, ids)
    sums = Partial.of_scores(
        logits.astype(jnp.float32), own, jnp.ones_like(own), temperature, axis=-1
    )
    sums = jax.tree.map(lambda x: x[..., 0], sums)
    stats = sums.stats(temperature).where(in_vocabulary(ids, logits.shape[-1]))
    return stats, (logits, ids, sums)


def _backward(
    temperature: float, residuals: tuple[Array, Array, Partial], cotangents: TokenStats
) -> tuple[Array, None]:
    logits, ids, sums = residuals
    counted = in_vocabulary(ids, logits.shape[-1])
    fields = ScoreGradient.of(sums, cotangents, temperature)
    own = _own(logits, ids)
    gradient = jax.tree.map(lambda x: x[..., None], fields).at(
        logits.astype(jnp.float32), own, temperature
    )
    # The logits of an ignored token may be anything, even NaN.
    return jnp.where(counted[..., None], gradient, 0.0).astype(logits.dtype), None


_stats.defvjp(_forward, _backward)


def _own(
    logits: Float[Array, "*batch T V"], ids: Int[Array, "*batch T"]
) -> Bool[Array, "*batch T V"]:
    """Returns True at each token's own logit."""
    return ids[..., None] == jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
