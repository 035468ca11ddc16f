"""The tokens of high entropy, on which alone the policy term can act (arXiv 2506.01939)."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

_ROUNDING = 1e-5
"""The error of float32 entropies, relative to the larger of themselves and 1."""


def entropy_floor(
    entropies: Float[Array, "P G Tc"], mask: Bool[Array, "P G Tc"], share: float
) -> Float[Array, ""]:
    """The least entropy of the `share` of the unmasked tokens with the highest ones.

    TRL's `get_high_entropy_mask` keeps what is at least the (1 - `share`) quantile. That is a
    token's own entropy or lies between two tokens', and then the upper one divides them as well:
    an order statistic, which no interpolation rounds. Tokens of equal entropies are kept together,
    also where theirs differ by rounding.
    """
    largest = jnp.finfo(jnp.float32).max
    ascending = jnp.sort(jnp.where(mask, entropies, largest).reshape(-1))
    place = (1 - share) * (mask.sum() - 1).astype(jnp.float32)
    # A place that is a whole number but for rounding is that number.
    floor = ascending[jnp.ceil(place * (1 - 1e-6)).astype(jnp.int32)]
    return jnp.where(mask.any(), floor - _ROUNDING * jnp.maximum(floor, 1), jnp.inf)
