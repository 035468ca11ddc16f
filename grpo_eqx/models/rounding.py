"""Rounding to int8, for rollouts: half the bytes that decoding reads of bfloat16."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int8

from grpo_eqx.models.product import product

_TINY = 1e-30  # divisor where all numbers are zero


def rounded_rows(
    x: Float[Array, "*rows columns"],
) -> tuple[Int8[Array, "*rows columns"], Float[Array, "*rows"]]:
    """Rounds to int8, symmetrically, with a float32 scale per row: its largest magnitude is 127."""
    x = x.astype(jnp.float32)
    scales = jnp.max(jnp.abs(x), axis=-1) / 127
    values = jnp.round(x / jnp.maximum(scales, _TINY)[..., None])
    return values.astype(jnp.int8), scales


class RoundedTable(eqx.Module):
    """Embeddings, or a language-model head, as int8 with a scale per token of the vocabulary."""

    values: Int8[Array, "V H"]
    scales: Float[Array, " V"]

    @classmethod
    def of(cls, table: Float[Array, "V H"]) -> "RoundedTable":
        """Rounds a table."""
        return cls(*rounded_rows(table))

    def __getitem__(self, ids: Int[Array, "*batch"]) -> Float[Array, "*batch H"]:
        """Looks up rows, float32."""
        return self.values[ids] * self.scales[ids][..., None]

    def project(self, hidden: Float[Array, "*batch H"]) -> Float[Array, "*batch V"]:
        """Projects hidden states to float32 logits."""
        # int8 numbers are exact in bfloat16, and unpacked within the product.
        values = self.values.astype(hidden.dtype)
        return product("...h,vh->...v", hidden, values) * self.scales
