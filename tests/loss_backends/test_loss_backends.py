"""Every backend against a float64 reference, values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_eqx.errors import UserError
from grpo_eqx.loss_backends import ChunkedLoss, DenseLoss, LossBackend, TokenStats

BACKENDS = [DenseLoss(), ChunkedLoss(), ChunkedLoss(chunk_size=7), ChunkedLoss(chunk_size=1)]
SHAPE = (2, 3, 5)  # P, G, Tc
VOCAB, HIDDEN = 37, 8


def inputs(seed: int, scale: float = 1.0) -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(seed)
    hidden = jnp.asarray(scale * rng.normal(size=(*SHAPE, HIDDEN)), jnp.float32)
    head = jnp.asarray(rng.normal(size=(VOCAB, HIDDEN)), jnp.float32)
    ids = jnp.asarray(rng.integers(VOCAB, size=SHAPE), jnp.int32)
    return hidden, head, ids


def reference(
    hidden: jax.Array, head: jax.Array, ids: jax.Array, temperature: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """log-probs, entropies and logsumexps in float64."""
    logits = np.asarray(hidden, np.float64) @ np.asarray(head, np.float64).T / temperature
    top = logits.max(-1, keepdims=True)
    logsumexps = (top + np.log(np.exp(logits - top).sum(-1, keepdims=True)))[..., 0]
    logprobs = logits - logsumexps[..., None]
    logps = np.take_along_axis(logprobs, np.asarray(ids)[..., None], -1)[..., 0]
    return logps, -(np.exp(logprobs) * logprobs).sum(-1), logsumexps


def reference_gradients(
    hidden: jax.Array, head: jax.Array, ids: jax.Array, temperature: float, cotangents: TokenStats
) -> tuple[np.ndarray, np.ndarray]:
    """Gradients of sum(cotangents * stats) for hidden states and head, by hand in float64."""
    _, entropies, logsumexps = reference(hidden, head, ids, temperature)
    logits = np.asarray(hidden, np.float64) @ np.asarray(head, np.float64).T / temperature
    logprobs = logits - logsumexps[..., None]
    probs = np.exp(logprobs)
    g_logp, g_entropy, g_lse = (np.asarray(g, np.float64)[..., None] for g in cotangents)
    dz = g_logp * (np.eye(VOCAB)[np.asarray(ids)] - probs)
    dz = (dz - g_entropy * probs * (logprobs + entropies[..., None]) + g_lse * probs) / temperature
    return dz @ np.asarray(head, np.float64), np.einsum("pgtv,pgth->vh", dz, np.asarray(hidden))


@pytest.mark.parametrize("backend", BACKENDS, ids=repr)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("scale", [1.0, 15.0], ids=["mild", "logits beyond 80"])
def test_equals_the_float64_reference(
    backend: LossBackend, temperature: float, scale: float
) -> None:
    hidden, head, ids = inputs(0, scale)
    stats = backend(hidden, head, ids, temperature)
    for found, expected in zip(stats, reference(hidden, head, ids, temperature), strict=True):
        size = max(1.0, np.abs(expected).max())
        np.testing.assert_allclose(found / size, expected / size, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS, ids=repr)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_gradients_through_arbitrary_cotangents(backend: LossBackend, temperature: float) -> None:
    hidden, head, ids = inputs(1)
    rng = np.random.default_rng(2)
    cotangents = TokenStats(*(jnp.asarray(rng.normal(size=SHAPE), jnp.float32) for _ in range(3)))
    _, pull = jax.vjp(lambda h, w: backend(h, w, ids, temperature), hidden, head)
    expected = reference_gradients(hidden, head, ids, temperature, cotangents)
    for gradient, reference_gradient in zip(pull(cotangents), expected, strict=True):
        size = np.abs(reference_gradient).max()
        np.testing.assert_allclose(gradient / size, reference_gradient / size, atol=1e-5)


def test_the_head_keeps_its_dtype_and_its_gradient_is_summed_in_float32() -> None:
    """Many equal small contributions: a bfloat16 sum of them would stop growing early."""
    hidden = jnp.ones((1, 1, 4096, HIDDEN), jnp.bfloat16)
    head = jnp.zeros((VOCAB, HIDDEN), jnp.float32)
    ids = jnp.zeros((1, 1, 4096), jnp.int32)
    gradient = jax.grad(lambda w: ChunkedLoss(chunk_size=16)(hidden, w, ids, 1.0).logps.sum())(head)
    assert gradient.dtype == jnp.float32
    np.testing.assert_allclose(gradient[1:], -4096 / VOCAB, rtol=4e-3)


def test_chunked_never_holds_all_logits() -> None:
    hidden, head, ids = inputs(3)
    stats = jax.jit(
        jax.grad(lambda h, w: ChunkedLoss(chunk_size=6)(h, w, ids, 1.0).logps.sum(), argnums=(0, 1))
    )
    text = stats.lower(hidden, head).compile().as_text()
    assert f"f32[5,2,3,1,{VOCAB}]" not in text
    assert f"f32[2,3,5,{VOCAB}]" not in text
    assert f"f32[2,3,1,{VOCAB}]" in text


def test_a_chunk_holds_at_least_one_token() -> None:
    with pytest.raises(UserError, match="chunk_size"):
        ChunkedLoss(chunk_size=0)
