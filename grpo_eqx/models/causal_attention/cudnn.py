"""Attention over whole sequences on NVIDIA GPUs."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from grpo_eqx.models.causal_attention.base import (
    CausalAttention,
    Inputs,
    Visible,
    on_each_device,
)
from grpo_eqx.models.causal_attention.blocked import BlockedAttention
from grpo_eqx.models.tiles import filled
from grpo_eqx.sharding.rollout_layout import RolloutLayout

_MULTIPLE = 8
"""Divisor of lengths and head sizes: cuDNN loads 16 bytes at a time."""
_LARGEST_HEAD = 128


class CudnnAttention(CausalAttention):
    """cuDNN's flash attention, with a mask that has a number for each query and key.

    Where cuDNN has no kernel, in float32 or with a soft cap for example, `BlockedAttention` is used
    instead.
    """

    mesh: jax.sharding.Mesh
    implementation: Literal["cudnn", "xla"] = "cudnn"
    """Implementation to use; `xla` computes the same on any device without a kernel, for tests."""
    layout: RolloutLayout | None = None
    """Layout of the rollout whose prompts are the rows. `None`: rows of training."""

    def over(self, layout: RolloutLayout) -> "CudnnAttention":
        return dataclasses.replace(self, layout=layout)

    def attend(
        self, inputs: Inputs, visible: Visible, softcap: float | None
    ) -> Float[Array, "R K r T D"]:
        dtype, D = inputs.queries.dtype, inputs.queries.shape[-1]
        has_kernel = dtype in (jnp.bfloat16, jnp.float16) or self.implementation == "xla"
        if not has_kernel or D % _MULTIPLE or D > _LARGEST_HEAD or softcap is not None:
            return BlockedAttention().attend(inputs, visible, softcap)
        return on_each_device(self.layout or self.mesh, self._in_kernel, inputs, visible)

    def _in_kernel(self, inputs: Inputs, visible: Visible) -> Float[Array, "R K r T D"]:
        R, K, repeats, T, D = inputs.queries.shape
        queries = inputs.queries.transpose(0, 3, 1, 2, 4).reshape(R, T, K * repeats, D)
        keys, values = inputs.keys.swapaxes(1, 2), inputs.values.swapaxes(1, 2)
        # Padding sees itself: cuDNN returns NaN for a query that sees nothing.
        by_query = Visible(*(x[..., None] for x in visible.filled(_MULTIPLE)))
        positions = jnp.arange(by_query.own_start.shape[1], dtype=jnp.int32)
        attended = jax.nn.dot_product_attention(
            filled(queries, 1, _MULTIPLE),
            filled(keys, 1, _MULTIPLE),
            filled(values, 1, _MULTIPLE),
            mask=by_query.shows(positions[:, None], positions)[:, None],
            implementation=self.implementation,
        )
        return attended[:, :T].reshape(R, T, K, repeats, D).transpose(0, 2, 3, 1, 4)
