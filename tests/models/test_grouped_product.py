"""Products by group: values, gradients, and the kernels for gradients on TPUs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from grpo_eqx.models.grouped_product import _compiled, _in_kernels, grouped_product

SIZES = np.array([3, 0, 301, 1, 95])
ROWS = SIZES.sum()


def operands(inner: int = 24, outer: int = 16) -> tuple[Array, ...]:
    """Rows, weights, sizes, and a gradient of the products."""
    rng = np.random.default_rng(0)
    rows, weights, dy = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in ((ROWS, inner), (len(SIZES), inner, outer), (ROWS, outer))
    )
    return rows, weights, jnp.asarray(SIZES, jnp.int32), dy


def test_each_row_meets_the_matrix_of_its_group() -> None:
    rows, weights, sizes, dy = operands()
    of_rows = np.repeat(np.arange(len(SIZES)), SIZES)

    def by_row(rows: Array, weights: Array) -> Array:
        return jnp.einsum("ri,rio->ro", rows, weights[of_rows])

    expected, expected_pullback = jax.vjp(by_row, rows, weights)
    found, pullback = jax.vjp(
        lambda rows, weights: grouped_product(rows, weights, sizes), rows, weights
    )
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
    for a, b in zip(pullback(dy), expected_pullback(dy), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("inner", "outer"), [(24, 16), (1200, 130)])
def test_the_kernels_compute_the_same_gradients(inner: int, outer: int) -> None:
    """Rows that are no whole tile, a group without any, and dimensions of several tiles."""
    given = operands(inner, outer)
    for a, b in zip(_in_kernels(*given, interpret=True), _compiled(*given), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-4 * np.abs(b).max())
