"""Products whose sums are float32, whatever the dtype of their operands."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def product(dims: str, x: Array, y: Array) -> Float[Array, "..."]:
    """Computes the einsum of two arrays of one dtype, accumulated in float32.

    For float32 this means true float32 products, which TPUs and GPUs would otherwise round.
    """
    exact = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum(dims, x, y, precision=exact, preferred_element_type=jnp.float32)


def inner_products(
    x: Float[Array, "*batch H"], y: Float[Array, "*batch H"]
) -> Float[Array, " *batch"]:
    """Computes the float32 inner products of rows.

    Not as `sum(x * y)`, which XLA's CPU compiler runs slowly where the leading dimension is 1.
    """
    exact = jax.lax.Precision.HIGHEST
    return jnp.vecdot(x.astype(jnp.float32), y.astype(jnp.float32), precision=exact)
