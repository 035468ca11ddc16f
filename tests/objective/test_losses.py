"""The clipped policy loss against its formula, value and gradient."""

import jax
import jax.numpy as jnp
import numpy as np

from grpo_eqx.objective import clipped_policy_loss

SHAPE = (3, 4, 6)
RNG = np.random.default_rng(0)
OLD = jnp.asarray(RNG.normal(-2, 1, SHAPE), jnp.float32)
NEW = OLD + jnp.asarray(RNG.normal(0, 0.4, SHAPE), jnp.float32)
ADVANTAGES = jnp.asarray(RNG.normal(size=SHAPE[:2]), jnp.float32)
RANGE = {"epsilon": 0.2, "epsilon_high": 0.28}


def test_value_equals_the_formula() -> None:
    ratio = np.exp(np.asarray(NEW, np.float64) - np.asarray(OLD, np.float64))
    advantage = np.asarray(ADVANTAGES, np.float64)[..., None]
    expected = -np.minimum(ratio * advantage, np.clip(ratio, 0.8, 1.28) * advantage)
    found = clipped_policy_loss(NEW, OLD, ADVANTAGES, **RANGE)
    np.testing.assert_allclose(found.losses, expected, rtol=1e-5)
    np.testing.assert_allclose(found.ratios, ratio, rtol=1e-5)


def test_gradient_is_cut_exactly_where_clipping_is_reported() -> None:
    gradient = jax.grad(lambda x: clipped_policy_loss(x, OLD, ADVANTAGES, **RANGE).losses.sum())(
        NEW
    )
    found = clipped_policy_loss(NEW, OLD, ADVANTAGES, **RANGE)
    cut = np.asarray(found.clipped_low + found.clipped_high)
    assert 0 < cut.mean() < 1
    assert (np.asarray(gradient)[cut == 1] == 0).all()
    unclipped = -np.asarray(found.ratios) * np.asarray(ADVANTAGES)[..., None]
    np.testing.assert_allclose(gradient, np.where(cut == 1, 0, unclipped), rtol=1e-5)


def test_on_policy_gradient_is_minus_the_advantage() -> None:
    gradient = jax.grad(
        lambda x: clipped_policy_loss(x, jax.lax.stop_gradient(x), ADVANTAGES, **RANGE).losses.sum()
    )(NEW)
    np.testing.assert_allclose(gradient, np.broadcast_to(-ADVANTAGES[..., None], SHAPE), rtol=1e-6)
