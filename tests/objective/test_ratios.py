"""Ratios and weights against explicit loops over sequences and tokens."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_eqx.common.choices import (
    ImportanceSamplingLevel,
    SamplerCorrection,
)
from grpo_eqx.objective.ratios import off_policy_keep, policy_ratios, sampler_weights

SHAPE = (2, 3, 5)
RNG = np.random.default_rng(0)
LOGPS = jnp.asarray(RNG.normal(-2, 1, SHAPE), jnp.float32)
OLD = LOGPS + jnp.asarray(RNG.normal(0, 0.4, SHAPE), jnp.float32)
SAMPLER = OLD + jnp.asarray(RNG.normal(0, 0.4, SHAPE), jnp.float32)
MASK = jnp.asarray(RNG.random(SHAPE) < 0.7).at[1, 2].set(False)
SEQUENCES = list(np.ndindex(SHAPE[:2]))


def differences(p: int, g: int, of: jax.Array, less: jax.Array) -> list[float]:
    """Those of a sequence's tokens that count."""
    return [float(of[p, g, t]) - float(less[p, g, t]) for t in range(5) if MASK[p, g, t]]


def gradient(function: Callable[[jax.Array], jax.Array], at: jax.Array) -> np.ndarray:
    return np.asarray(jax.grad(lambda x: function(x).sum())(at))


def test_token_ratios_are_each_tokens_own() -> None:
    found = policy_ratios(LOGPS, OLD, MASK, "token")
    for p, g, t in np.ndindex(SHAPE):
        expected = math.exp(float(LOGPS[p, g, t]) - float(OLD[p, g, t]))
        np.testing.assert_allclose(found[p, g, t], expected, rtol=1e-5)


@pytest.mark.parametrize("level", ["sequence", "sequence_token"])
def test_sequence_ratios_are_the_geometric_mean_over_the_tokens_that_count(
    level: ImportanceSamplingLevel,
) -> None:
    found = policy_ratios(LOGPS, OLD, MASK, level)
    assert found.shape == (*SHAPE[:2], 1 if level == "sequence" else 5)
    for p, g in SEQUENCES:
        of_tokens = differences(p, g, LOGPS, OLD)
        expected = math.exp(sum(of_tokens) / max(len(of_tokens), 1))
        np.testing.assert_allclose(found[p, g], expected, rtol=1e-5)


def test_sequence_ratios_share_their_gradient_and_sequence_token_ratios_do_not() -> None:
    """The gradient of a ratio is the ratio times that of its log-prob, or of their mean."""
    ratios = np.asarray(policy_ratios(LOGPS, OLD, MASK, "sequence"))
    lengths = np.maximum(np.asarray(MASK).sum(-1, keepdims=True), 1)
    shared = gradient(lambda x: policy_ratios(x, OLD, MASK, "sequence"), LOGPS)
    np.testing.assert_allclose(shared, np.where(MASK, ratios / lengths, 0), rtol=1e-5)
    weights = jnp.asarray(RNG.normal(size=SHAPE), jnp.float32)
    own = gradient(lambda x: weights * policy_ratios(x, OLD, MASK, "sequence_token"), LOGPS)
    np.testing.assert_allclose(own, weights * ratios, rtol=1e-5)


@pytest.mark.parametrize("level", ["sequence", "sequence_token"])
def test_the_two_forms_agree_where_a_sequences_tokens_have_one_weight(
    level: ImportanceSamplingLevel,
) -> None:
    """The mean over a sequence's tokens then has one gradient (GSPO, section 4.3)."""
    lengths = jnp.maximum(MASK.sum(-1, keepdims=True), 1)
    found = gradient(
        lambda x: jnp.where(MASK, policy_ratios(x, OLD, MASK, level), 0) / lengths, LOGPS
    )
    ratios = np.asarray(policy_ratios(LOGPS, OLD, MASK, "sequence"))
    np.testing.assert_allclose(found, np.where(MASK, ratios / lengths, 0), rtol=1e-5)


@pytest.mark.parametrize(("low", "high"), [(None, 1.1), (0.9, None), (0.9, 1.1), (None, None)])
@pytest.mark.parametrize(
    "mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
)
def test_sampler_weights_are_truncated_or_masked(
    mode: SamplerCorrection, low: float | None, high: float | None
) -> None:
    def weight(log_ratio: float) -> float:
        ratio = math.exp(log_ratio)
        if low is not None and ratio < low:
            return low if mode.endswith("truncate") else 0.0
        if high is not None and ratio > high:
            return high if mode.endswith("truncate") else 0.0
        return ratio

    found = sampler_weights(OLD, SAMPLER, MASK, mode, low, high)
    for p, g in SEQUENCES:
        of_tokens = differences(p, g, OLD, SAMPLER)
        if mode.startswith("token"):
            expected = [weight(x) for x in of_tokens]
            np.testing.assert_allclose(found[p, g][MASK[p, g]], expected, rtol=1e-5)
        else:
            np.testing.assert_allclose(found[p, g], [weight(sum(of_tokens))], rtol=1e-5)


@pytest.mark.parametrize("mode", ["token_truncate", "sequence_mask"])
def test_sampler_weights_are_constants(mode: SamplerCorrection) -> None:
    found = gradient(lambda x: sampler_weights(x, SAMPLER, MASK, mode, None, None), OLD)
    assert (found == 0).all()


def test_sequences_of_negative_advantage_that_drifted_are_left_out() -> None:
    advantages = jnp.asarray([[-1.0, 1.0, -1.0], [0.0, -1.0, -1.0]])
    for threshold in (-0.3, 0.0, 0.1, 0.3):
        found = off_policy_keep(LOGPS, SAMPLER, MASK, advantages, threshold)
        for p, g in SEQUENCES:
            of_tokens = differences(p, g, SAMPLER, LOGPS)
            drift = sum(of_tokens) / max(len(of_tokens), 1)
            assert found[p, g, 0] == (advantages[p, g] >= 0 or drift <= threshold)
