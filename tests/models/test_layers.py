"""The layers' own derivatives are those of their formulas."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_eqx.models.layers import rms_norm, swiglu


def plain_rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return scale * x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-3)


def plain_swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    return gate / (1 + jnp.exp(-gate)) * up


@pytest.mark.parametrize(
    ("layer", "plain", "second"),
    [
        (lambda x, scale: rms_norm(x, scale, 1e-3), plain_rms_norm, (32,)),
        (swiglu, plain_swiglu, (2, 7, 32)),
    ],
    ids=["rms_norm", "swiglu"],
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_values_and_gradients_are_those_of_the_formula_in_float32(
    layer: Callable[..., jax.Array],
    plain: Callable[..., jax.Array],
    second: tuple[int, ...],
    dtype: jnp.dtype,
) -> None:
    rng = np.random.default_rng(3)
    shapes = (2, 7, 32), second, (2, 7, 32)
    x, y, slope = (jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)
    exact = [each.astype(jnp.float32) for each in (x, y, slope)]
    value, pull = jax.vjp(layer, x, y)
    expected, pull_expected = jax.vjp(plain, *exact[:2])
    eps = float(jnp.finfo(dtype).eps)
    for ours, theirs in zip(
        (value, *pull(slope)), (expected, *pull_expected(exact[2])), strict=True
    ):
        assert ours.dtype == dtype
        error = jnp.linalg.norm(ours.astype(jnp.float32) - theirs)
        assert error < 4 * eps * jnp.linalg.norm(theirs)


def test_gradients_of_tokens_that_are_all_zeros_are_finite() -> None:
    x, scale = jnp.zeros((3, 8)), jnp.ones(8)
    gradients = jax.grad(lambda *args: rms_norm(*args, 1e-6).sum(), argnums=(0, 1))(x, scale)
    assert all(np.isfinite(g).all() for g in gradients)
