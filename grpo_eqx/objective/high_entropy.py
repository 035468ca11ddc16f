"""High-entropy tokens, to which the policy term can be restricted (arXiv 2506.01939)."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from grpo_eqx.common.shapes import Number

_ROUNDING = 1e-5
"""Error of a float32 entropy, relative to the larger of the entropy and 1."""


def entropy_floor(
    entropies: Float[Array, "P G Tc"], mask: Bool[Array, "P G Tc"], rest: Number
) -> Float[Array, ""]:
    """Returns the lowest entropy of the unmasked tokens but the `rest` with the lowest entropies.

    TRL's `get_high_entropy_mask` keeps entropies of at least the `rest` quantile. That
    is a token's own entropy or lies between two tokens', where the upper one separates them just as
    well: an order statistic, free of interpolation's rounding. Tokens of equal entropy are kept
    together, even if theirs differ by rounding.
    """
    largest = jnp.finfo(jnp.float32).max
    ascending = jnp.sort(jnp.where(mask, entropies, largest).reshape(-1))
    rank = rest * (mask.sum() - 1).astype(jnp.float32)
    # A rank that rounding puts just above a whole number is that number.
    floor = ascending[jnp.ceil(rank * (1 - 1e-6)).astype(jnp.int32)]
    return jnp.where(mask.any(), floor - _ROUNDING * jnp.maximum(floor, 1), jnp.inf)
