"""Products with float32 sums."""

import jax.numpy as jnp
import numpy as np
import pytest

from grpo_eqx.models.product import inner_products, product


@pytest.mark.parametrize("shape", [(6,), (1, 1, 5, 6), (2, 3, 6)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_inner_products_are_sums_of_products(shape: tuple[int, ...], dtype: str) -> None:
    x, y = jnp.asarray(np.random.default_rng(0).normal(size=(2, *shape)), dtype)
    found = inner_products(x, y)
    assert found.dtype == jnp.float32
    expected = (np.asarray(x, np.float64) * np.asarray(y, np.float64)).sum(axis=-1)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_products_of_rounded_numbers_are_summed_in_float32() -> None:
    ones = jnp.ones((1, 1000), jnp.bfloat16)
    assert product("ik,jk->ij", ones, ones).dtype == jnp.float32
    assert product("ik,jk->ij", ones, ones).item() == 1000  # bfloat16 would stop at 256
