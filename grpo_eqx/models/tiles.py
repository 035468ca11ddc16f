"""Tiles that a long dimension is processed in, and arrays that fill whole ones."""

import jax.numpy as jnp
from jaxtyping import Array


def even_tile(length: int, most: int, multiple: int = 1) -> int:
    """Returns the size of about even tiles, as few as `most` allows.

    It is a multiple of `multiple`, and above `most` only where that is less than one multiple.
    """
    most = max(multiple, most // multiple * multiple)
    count = max(1, -(-length // most))
    even = max(1, -(-length // count))
    return -(-even // multiple) * multiple


def filled(x: Array, axis: int, multiple: int, value: float = 0) -> Array:
    """Pads the end of an axis with `value`, so that its length is a multiple of `multiple`."""
    pads = [(0, 0)] * x.ndim
    pads[axis] = (0, -x.shape[axis] % multiple)
    return jnp.pad(x, pads, constant_values=value)
