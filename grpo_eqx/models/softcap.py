"""Soft caps of attention scores and of logits (Gemma 2, arXiv 2408.00118, section 2)."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def soft_capped(x: Float[Array, "*shape"], cap: float | None) -> Float[Array, "*shape"]:
    """Bounds values smoothly by `cap`, as `cap * tanh(x / cap)`. `None`: returns them."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def gradient_before_cap(
    gradient: Float[Array, "*shape"], capped: Float[Array, "*shape"], cap: float | None
) -> Float[Array, "*shape"]:
    """Multiplies the gradient of capped values by the slope of the cap, `1 - (capped / cap)**2`.

    The slope is 0 at masked values: any number below `-cap` that was put in after the cap.
    """
    if cap is None:
        return gradient
    tanh = jnp.clip(capped / cap, -1.0, 1.0)
    return gradient * (1.0 - tanh * tanh)
