"""A soft cap is a scaled tanh, and its slope that of autodiff."""

import jax
import jax.numpy as jnp
import numpy as np

from grpo_eqx.models.running_softmax import MASKED
from grpo_eqx.models.softcap import gradient_before_cap, soft_capped


def test_values_and_gradient_are_those_of_the_tanh() -> None:
    x = np.linspace(-300, 300, 1001)
    capped, pull = jax.vjp(lambda x: soft_capped(x, 30.0), jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(capped, 30 * np.tanh(x / 30), rtol=1e-6)
    slope = jnp.linspace(-2, 2, 1001)
    np.testing.assert_allclose(gradient_before_cap(slope, capped, 30.0), pull(slope)[0], atol=1e-6)


def test_small_values_are_kept_and_no_cap_keeps_all() -> None:
    small = jnp.linspace(-0.01, 0.01, 11)
    np.testing.assert_allclose(soft_capped(small, 50.0), small, atol=1e-8)
    assert soft_capped(small, None) is small
    assert gradient_before_cap(small, small, None) is small


def test_masked_values_have_no_gradient() -> None:
    masked = jnp.full(3, MASKED)
    np.testing.assert_array_equal(gradient_before_cap(jnp.ones(3), masked, 50.0), 0)
