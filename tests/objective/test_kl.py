"""KL estimates against their formulas, and their expectations against the exact divergence."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from grpo_eqx.common.choices import KLEstimator
from grpo_eqx.objective import kl_estimates

D = np.array([-30.0, -19.0, -3.0, -0.5, -1e-3, 0.0, 1e-3, 0.5, 3.0, 19.0, 30.0], np.float32)
FORMULAS: dict[KLEstimator, Callable[[np.ndarray], np.ndarray]] = {
    "k1": lambda d: d,
    "k2": lambda d: d**2 / 2,
    "k3": lambda d: np.expm1(-np.maximum(d, -20)) + np.maximum(d, -20),
}

# A policy and a reference over five tokens: expectations are sums.
LOGITS = jnp.asarray([0.3, -1.2, 0.8, 0.1, -0.4])
REFERENCE = jax.nn.log_softmax(jnp.asarray([-0.5, 0.4, 0.6, -1.0, 0.9]))


def estimates(
    d: np.ndarray | jax.Array, estimator: KLEstimator, clamp: float | None = None
) -> jax.Array:
    """Estimates at differences `d`."""
    d = jnp.asarray(d, jnp.float32)[None, None]
    return kl_estimates(d, jnp.zeros_like(d), estimator, clamp)[0, 0]


def slopes(d: np.ndarray, estimator: KLEstimator, clamp: float | None = None) -> np.ndarray:
    """Derivatives of the estimates for the policy's log-probs."""
    return np.asarray(jax.grad(lambda x: estimates(x, estimator, clamp).sum())(jnp.asarray(d)))


def divergence(logits: jax.Array) -> jax.Array:
    """KL(policy || reference), exactly."""
    logps = jax.nn.log_softmax(logits)
    return jnp.sum(jnp.exp(logps) * (logps - REFERENCE))


def expected_loss(logits: jax.Array, estimator: KLEstimator, with_ratio: bool) -> jax.Array:
    """The mean of the estimates over tokens that the policy, held fixed, draws.

    With the importance ratio, whose value is 1, as a factor where asked for.
    """
    logps = jax.nn.log_softmax(logits)
    drawn_with = jnp.exp(jax.lax.stop_gradient(logps))
    kl = kl_estimates(logps[None, None], REFERENCE[None, None], estimator)[0, 0]
    ratio = jnp.exp(logps - jax.lax.stop_gradient(logps)) if with_ratio else 1.0
    return jnp.sum(drawn_with * ratio * kl)


@pytest.mark.parametrize("estimator", FORMULAS)
def test_estimates_equal_the_formulas(estimator: KLEstimator) -> None:
    expected = FORMULAS[estimator](D.astype(np.float64))
    np.testing.assert_allclose(estimates(D, estimator), expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("estimator", FORMULAS)
@pytest.mark.parametrize("clamp", [0.1, 10.0, 1e6])
def test_a_clamp_bounds_estimates_and_the_exponent_of_k3(
    estimator: KLEstimator, clamp: float
) -> None:
    d = D.astype(np.float64)
    inside = d > (-20 if estimator == "k3" else -np.inf)
    unbounded = FORMULAS[estimator](d)
    found = estimates(D, estimator, clamp)
    np.testing.assert_allclose(found, np.clip(unbounded, -clamp, clamp), rtol=1e-5, atol=1e-8)
    free = inside & (np.abs(unbounded) < clamp)
    assert free.any()
    slope = slopes(D, estimator, clamp)
    assert (slope[~free] == 0).all()
    np.testing.assert_array_equal(slope[free], slopes(D, estimator)[free])


@given(arrays(np.float32, 20, elements=st.floats(-80, 80, width=32)))
def test_k3_is_never_negative(d: np.ndarray) -> None:
    assert (jax.jit(estimates, static_argnums=1)(d, "k3") >= 0).all()


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_expectation_is_the_divergence(estimator: KLEstimator) -> None:
    found = expected_loss(LOGITS, estimator, with_ratio=False)
    np.testing.assert_allclose(found, divergence(LOGITS), rtol=1e-5)


@pytest.mark.parametrize(("estimator", "with_ratio"), [("k2", False), ("k1", True), ("k3", True)])
def test_expected_gradient_is_that_of_the_divergence(
    estimator: KLEstimator, with_ratio: bool
) -> None:
    found = jax.grad(expected_loss)(LOGITS, estimator, with_ratio)
    exact = jax.grad(divergence)(LOGITS)
    assert jnp.abs(exact).min() > 0.01
    np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-6)


def test_expected_gradient_of_k1_alone_is_zero() -> None:
    np.testing.assert_allclose(jax.grad(expected_loss)(LOGITS, "k1", False), 0, atol=1e-6)


def test_gradients_of_k2_and_k3_alone_agree_near_the_reference() -> None:
    """The slopes are d and 1 - exp(-d), equal to first order."""
    d = np.linspace(-0.01, 0.01, 11).astype(np.float32)
    np.testing.assert_allclose(slopes(d, "k3"), slopes(d, "k2"), atol=0.01**2)
