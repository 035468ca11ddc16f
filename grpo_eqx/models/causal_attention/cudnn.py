"""Attention over whole sequences on NVIDIA GPUs."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from grpo_eqx.models.causal_attention.base import (
    CausalAttention,
    Inputs,
    Masks,
    filled,
    on_each_device,
)
from grpo_eqx.models.causal_attention.blocked import BlockedAttention

_MULTIPLE = 8
"""Divisor of lengths and head sizes: cuDNN loads 16 bytes at a time."""
_LARGEST_HEAD = 128


class CudnnAttention(CausalAttention):
    """cuDNN's flash attention over each row's prompt and own keys, concatenated.

    Each row gets a copy of its prompt's keys, and a mask with a number for each query and key.
    Where cuDNN has no kernel, in float32 for example, `BlockedAttention` is used instead.
    """

    mesh: jax.sharding.Mesh
    implementation: Literal["cudnn", "xla"] = "cudnn"
    """Implementation to use; `xla` computes the same on any device without a kernel, for tests."""

    def attend(self, inputs: Inputs, masks: Masks) -> Float[Array, "P K R r T D"]:
        dtype, D = inputs.queries.dtype, inputs.queries.shape[-1]
        has_kernel = dtype in (jnp.bfloat16, jnp.float16) or self.implementation == "xla"
        if not has_kernel or D % _MULTIPLE or D > _LARGEST_HEAD:
            return BlockedAttention().attend(inputs, masks)
        return on_each_device(self.mesh, self._in_kernel, inputs, masks)

    def _in_kernel(self, inputs: Inputs, masks: Masks) -> Float[Array, "P K R r T D"]:
        q = inputs.queries
        P, K, R, repeats, T, D = q.shape
        keys, values = inputs.own
        seen = _seen_of_row(masks.spans)
        if (shared := inputs.shared) is not None and masks.visible is not None:
            keys, values = (_after(x, y) for x, y in zip(shared, inputs.own, strict=True))
            of_prompt = jnp.broadcast_to(masks.visible[:, None, None], (P, R, T, keys.shape[3] - T))
            seen = jnp.concatenate([of_prompt, seen], axis=3)
        keys, values = (x.transpose(0, 2, 3, 1, 4).reshape(P * R, -1, K, D) for x in (keys, values))
        attended = jax.nn.dot_product_attention(
            filled(q.transpose(0, 2, 4, 1, 3, 5).reshape(P * R, T, K * repeats, D), 1, _MULTIPLE),
            filled(keys, 1, _MULTIPLE),
            filled(values, 1, _MULTIPLE),
            # Padding queries see something: cuDNN returns NaN for a query that sees nothing.
            mask=filled(filled(seen.reshape(P * R, 1, T, -1), 2, _MULTIPLE, True), 3, _MULTIPLE),
            implementation=self.implementation,
        )
        return attended[:, :T].reshape(P, R, T, K, repeats, D).transpose(0, 3, 1, 4, 2, 5)


def _seen_of_row(spans: Int[Array, "P R T"]) -> Bool[Array, "P R T T"]:
    """Returns the mask of its row's keys that each query sees."""
    T = spans.shape[-1]
    return jnp.tril(jnp.ones((T, T), bool)) & (spans[..., None] == spans[..., None, :])


def _after(shared: Float[Array, "P K S D"], own: Float[Array, "P K R T D"]) -> Array:
    """Prepends a copy of the prompt's keys (or values) to each row: `[P, K, R, S + T, D]`."""
    copies = jnp.broadcast_to(shared[:, :, None], (*own.shape[:3], *shared.shape[2:]))
    return jnp.concatenate([copies, own], axis=3)
