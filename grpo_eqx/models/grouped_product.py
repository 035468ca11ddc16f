"""Products of rows, sorted by group, with the matrix of their group."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from grpo_eqx.models.tiles import even_tile

_TRANSPOSED = jax.lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])
_BY_GROUP = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
_ROW_TILE = 256
_MOST, _LANES = 1024, 128


@jax.custom_vjp
def grouped_product(
    rows: Float[Array, "rows in"], weights: Float[Array, "E in out"], sizes: Int[Array, " E"]
) -> Float[Array, "rows out"]:
    """Multiplies each row by the matrix of its group.

    **Arguments:**

    - `rows`: the rows, ordered by group.
    - `weights`: a matrix for each group.
    - `sizes`: number of rows of each group; their sum is the number of all rows.
    """
    return jax.lax.ragged_dot(rows, weights, sizes)


def _forward(
    rows: Float[Array, "rows in"], weights: Float[Array, "E in out"], sizes: Int[Array, " E"]
) -> tuple[Float[Array, "rows out"], tuple[Array, Array, Array]]:
    return grouped_product(rows, weights, sizes), (rows, weights, sizes)


def _backward(
    residuals: tuple[Array, Array, Array], dy: Float[Array, "rows out"]
) -> tuple[Float[Array, "rows in"], Float[Array, "E in out"], None]:
    """Computes the usual gradients; on TPUs with JAX's kernels (MegaBlocks, arXiv 2211.15841).

    XLA's TPU compiler transposes all weights for the gradient of rows, and computes that of weights
    from every row for every group.
    """
    gradients = jax.lax.platform_dependent(*residuals, dy, tpu=_in_kernels, default=_compiled)
    return *gradients, None


def _compiled(
    rows: Float[Array, "rows in"],
    weights: Float[Array, "E in out"],
    sizes: Int[Array, " E"],
    dy: Float[Array, "rows out"],
) -> tuple[Float[Array, "rows in"], Float[Array, "E in out"]]:
    by_rows = jax.lax.ragged_dot_general(dy, weights, sizes, _TRANSPOSED)
    return by_rows, jax.lax.ragged_dot_general(rows, dy, sizes, _BY_GROUP)


def _in_kernels(
    rows: Float[Array, "rows in"],
    weights: Float[Array, "E in out"],
    sizes: Int[Array, " E"],
    dy: Float[Array, "rows out"],
    interpret: bool = False,
) -> tuple[Float[Array, "rows in"], Float[Array, "E in out"]]:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm

    number, (_, wide, narrow) = len(rows), weights.shape
    wide, narrow = even_tile(wide, _MOST, _LANES), even_tile(narrow, _MOST, _LANES)
    # Rows that pad the last tile belong to no group.
    rows, dy = (jnp.pad(x, ((0, -number % _ROW_TILE), (0, 0))) for x in (rows, dy))
    by_rows = gmm(
        dy,
        weights,
        sizes,
        rows.dtype,
        (_ROW_TILE, narrow, wide),
        transpose_rhs=True,
        interpret=interpret,
    )
    by_weights = tgmm(
        rows.T, dy, sizes, weights.dtype, (_ROW_TILE, wide, narrow), interpret=interpret
    )
    return by_rows[:number], by_weights


grouped_product.defvjp(_forward, _backward)
