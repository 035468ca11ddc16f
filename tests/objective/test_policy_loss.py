"""The policy losses against their formulas, value and gradient, in float64."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_eqx.objective.policy_loss import cispo_loss, clipped_loss, sapo_loss

RNG = np.random.default_rng(0)
RATIOS = jnp.asarray(np.exp(RNG.normal(0, 0.7, (3, 4, 6))), jnp.float32)
LOGPS = jnp.asarray(RNG.normal(-2, 1, (3, 4, 6)), jnp.float32)
ADVANTAGES = jnp.asarray(RNG.normal(size=(3, 4)), jnp.float32).at[1, 2].set(0)
RANGE = {"epsilon": 0.2, "epsilon_high": 0.28}

R = np.asarray(RATIOS, np.float64)
A = np.broadcast_to(np.asarray(ADVANTAGES, np.float64)[..., None], R.shape)


def gradient(losses: Callable[[jax.Array], jax.Array], at: jax.Array) -> np.ndarray:
    return np.asarray(jax.grad(lambda x: losses(x).sum())(at))


def test_clipped_loss_equals_the_formula() -> None:
    found = clipped_loss(RATIOS, ADVANTAGES, **RANGE)
    expected = -np.minimum(R * A, np.clip(R, 0.8, 1.28) * A)
    np.testing.assert_allclose(found.losses, expected, rtol=1e-5)
    np.testing.assert_array_equal(found.clipped_low, (R < 0.8) & (A < 0))
    np.testing.assert_array_equal(found.clipped_high, (R > 1.28) & (A > 0))


def test_gradient_is_zero_exactly_where_clipping_is_reported() -> None:
    clipped = clipped_loss(RATIOS, ADVANTAGES, **RANGE)
    cut = np.asarray(clipped.clipped_low | clipped.clipped_high)
    found = gradient(lambda r: clipped_loss(r, ADVANTAGES, **RANGE).losses, RATIOS)
    assert 0 < cut.mean() < 1
    np.testing.assert_array_equal(found == 0, cut | (A == 0))
    np.testing.assert_allclose(found, np.where(cut, 0, -A), rtol=1e-6)


def test_delta_caps_large_ratios_at_negative_advantages_only() -> None:
    def losses(ratios: jax.Array) -> jax.Array:
        return clipped_loss(ratios, ADVANTAGES, **RANGE, delta=1.5).losses

    expected = -np.minimum(np.minimum(R, 1.5) * A, np.clip(R, 0.8, 1.28) * A)
    np.testing.assert_allclose(losses(RATIOS), expected, rtol=1e-5)
    capped, cut = (R > 1.5) & (A < 0), ((R < 0.8) & (A < 0)) | ((R > 1.28) & (A > 0))
    assert capped.any()
    np.testing.assert_allclose(gradient(losses, RATIOS), np.where(capped | cut, 0, -A), rtol=1e-6)


def test_dual_clip_bounds_the_loss_at_negative_advantages() -> None:
    found = clipped_loss(RATIOS, ADVANTAGES, **RANGE, dual_clip=3.0).losses
    plain = -np.minimum(R * A, np.clip(R, 0.8, 1.28) * A)
    assert ((R > 3) & (A < 0)).any()
    np.testing.assert_allclose(found, np.where(A < 0, np.minimum(plain, -3 * A), plain), rtol=1e-5)


@pytest.mark.parametrize("bound", [1.29, 1.5, 3.0])
def test_delta_and_dual_clip_are_one_bound_above_the_range(bound: float) -> None:
    def by_delta(ratios: jax.Array) -> jax.Array:
        return clipped_loss(ratios, ADVANTAGES, **RANGE, delta=bound).losses

    def by_dual_clip(ratios: jax.Array) -> jax.Array:
        return clipped_loss(ratios, ADVANTAGES, **RANGE, dual_clip=bound).losses

    np.testing.assert_allclose(by_delta(RATIOS), by_dual_clip(RATIOS), rtol=1e-6)
    np.testing.assert_array_equal(gradient(by_delta, RATIOS), gradient(by_dual_clip, RATIOS))


def test_cispo_caps_the_weight_and_keeps_every_gradient() -> None:
    found = cispo_loss(LOGPS, RATIOS, ADVANTAGES, epsilon_high=1.5)
    weights = np.minimum(R, 1.5)
    np.testing.assert_allclose(found.losses, -weights * A * np.asarray(LOGPS), rtol=1e-5)
    np.testing.assert_array_equal(found.clipped_high, (R > 1.5) & (A > 0))
    assert not found.clipped_low.any()
    of_logps = gradient(lambda x: cispo_loss(x, RATIOS, ADVANTAGES, epsilon_high=1.5).losses, LOGPS)
    np.testing.assert_allclose(of_logps, -weights * A, rtol=1e-6)
    of_ratios = gradient(
        lambda x: cispo_loss(LOGPS, x, ADVANTAGES, epsilon_high=1.5).losses, RATIOS
    )
    assert (of_ratios == 0).all()


def test_sapo_equals_the_formula() -> None:
    def losses(ratios: jax.Array) -> jax.Array:
        return sapo_loss(ratios, ADVANTAGES, temperature_pos=1.0, temperature_neg=2.0).losses

    tau = np.where(A > 0, 1.0, 2.0)
    gate = 1 / (1 + np.exp(-tau * (R - 1)))
    np.testing.assert_allclose(losses(RATIOS), -gate * 4 / tau * A, rtol=1e-5)
    np.testing.assert_allclose(gradient(losses, RATIOS), -4 * gate * (1 - gate) * A, rtol=1e-4)


def test_ratios_of_sequences_have_one_loss_each() -> None:
    for losses in (
        clipped_loss(RATIOS[..., :1], ADVANTAGES, **RANGE),
        sapo_loss(RATIOS[..., :1], ADVANTAGES, temperature_pos=1.0, temperature_neg=1.05),
    ):
        assert {x.shape for x in losses} == {(3, 4, 1)}
