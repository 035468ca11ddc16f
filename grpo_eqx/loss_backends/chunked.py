"""Log-probs without the whole logits: a few tokens at a time, forward and backward."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from grpo_eqx.errors import UserError
from grpo_eqx.loss_backends.base import LossBackend, TokenStats
from grpo_eqx.loss_backends.dense import scaled_logits, stats_of_logits


class ChunkedLoss(LossBackend):
    """Scans over stretches of tokens; the backward pass computes each stretch's logits again.

    At most about `chunk_size x V` logits exist at any time. It cuts along the last token axis, so
    leading axes keep whatever sharding they have.
    """

    chunk_size: int = 2048
    """Tokens whose logits exist at a time, over all leading axes together."""

    def __check_init__(self) -> None:
        if self.chunk_size < 1:
            raise UserError(f"chunk_size is {self.chunk_size}: it must be at least 1.")

    def __call__(
        self,
        hidden: Float[Array, "*batch T H"],
        head: Float[Array, "V H"],
        ids: Int[Array, "*batch T"],
        temperature: float,
    ) -> TokenStats:
        length = ids.shape[-1]
        width = max(1, min(length, self.chunk_size * length // ids.size))
        padding = -length % width

        def cut(x: Array) -> Array:
            axis = ids.ndim - 1
            pads = [(0, padding if i == axis else 0) for i in range(x.ndim)]
            stretches = (*x.shape[:axis], -1, width, *x.shape[axis + 1 :])
            return jnp.moveaxis(jnp.pad(x, pads).reshape(stretches), axis, 0)

        stats = _chunked_stats(cut(hidden), head, cut(ids), temperature)
        return TokenStats(
            *(jnp.moveaxis(x, 0, -2).reshape(*ids.shape[:-1], -1)[..., :length] for x in stats)
        )


class _Residuals(NamedTuple):
    hidden: Float[Array, "chunks *batch T H"]
    head: Float[Array, "V H"]
    ids: Int[Array, "chunks *batch T"]
    stats: TokenStats


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _chunked_stats(
    hidden: Float[Array, "chunks *batch T H"],
    head: Float[Array, "V H"],
    ids: Int[Array, "chunks *batch T"],
    temperature: float,
) -> TokenStats:
    return _forward(hidden, head, ids, temperature)[0]


def _forward(
    hidden: Float[Array, "chunks *batch T H"],
    head: Float[Array, "V H"],
    ids: Int[Array, "chunks *batch T"],
    temperature: float,
) -> tuple[TokenStats, _Residuals]:
    compute_head = head.astype(hidden.dtype)
    stats = jax.lax.map(
        lambda x: stats_of_logits(scaled_logits(x[0], compute_head, temperature), x[1]),
        (hidden, ids),
    )
    return stats, _Residuals(hidden, head, ids, stats)


def _backward(
    temperature: float, residuals: _Residuals, cotangents: TokenStats
) -> tuple[Array, Array, None]:
    """Pulls cotangents back through the logits z, a stretch at a time.

    dz = [g_logp (1_y - p) - g_H p (log p + H) + g_lse p] / temperature
    """
    hidden, head, ids, stats = residuals
    compute_head = head.astype(hidden.dtype)

    def step(
        head_gradient: Float[Array, "V H"],
        xs: tuple[Array, Array, TokenStats, TokenStats],
    ) -> tuple[Float[Array, "V H"], Array]:
        hidden, ids, stats, g = xs
        logits = scaled_logits(hidden, compute_head, temperature)
        logprobs = logits - stats.logsumexps[..., None]
        to_all = g.logsumexps[..., None] - g.logps[..., None]
        to_all = to_all - g.entropies[..., None] * (logprobs + stats.entropies[..., None])
        chosen = jax.nn.one_hot(ids, head.shape[0], dtype=jnp.float32)
        dz = (jnp.exp(logprobs) * to_all + chosen * g.logps[..., None]) / temperature
        dz = dz.astype(hidden.dtype)
        head_gradient = head_gradient + jnp.einsum(
            "...v,...h->vh", dz, hidden, preferred_element_type=jnp.float32
        )
        hidden_gradient = jnp.einsum(
            "...v,vh->...h", dz, compute_head, preferred_element_type=jnp.float32
        )
        return head_gradient, hidden_gradient.astype(hidden.dtype)

    start = jnp.zeros(head.shape, jnp.float32)
    head_gradient, hidden_gradient = jax.lax.scan(step, start, (hidden, ids, stats, cotangents))
    return hidden_gradient, head_gradient.astype(head.dtype), None


_chunked_stats.defvjp(_forward, _backward)
