"""Attention in blocks is the textbook's, and so are its gradients."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_eqx.models.attention import KeyValues, Segment
from grpo_eqx.models.causal_attention import causal_attention

P, R, N, K, D = 2, 3, 4, 2, 8
BLOCK = 16


class Case(NamedTuple):
    """Random arguments; `slope` is the gradient by the result."""

    queries: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    prompt_keys: np.ndarray
    prompt_values: np.ndarray
    slope: np.ndarray


def case(T: int, S: int, scale: float = 1.0) -> Case:
    rng = np.random.default_rng(T * S)
    wide, own, prompt = (P, R, T, N, D), (P, R, K, T, D), (P, 1, K, S, D)
    arrays = [rng.normal(size=shape) for shape in (wide, own, own, prompt, prompt, wide)]
    arrays[0] *= scale
    return Case(*(x.astype(np.float32) for x in arrays))


def reference(
    case: Case, spans: np.ndarray, visible: np.ndarray
) -> tuple[np.ndarray, list[np.ndarray]]:
    """One softmax over all keys, in float64, and the gradients by hand."""
    arrays = [x.astype(np.float64) for x in case]
    q, k, v, prompt_k, prompt_v, slope = arrays
    T, S = q.shape[2], prompt_k.shape[3]
    result, gradients = np.zeros_like(q), [np.zeros_like(x) for x in arrays[:5]]
    for p, r, n in np.ndindex(P, R, N):
        head = n // (N // K)
        keys = np.concatenate([prompt_k[p, 0, head], k[p, r, head]])
        values = np.concatenate([prompt_v[p, 0, head], v[p, r, head]])
        own = np.tril(np.ones((T, T), bool)) & (spans[p, r][:, None] == spans[p, r])
        seen = np.concatenate([np.tile(visible[p], (T, 1)), own], axis=1)
        scores = np.where(seen, q[p, r, :, n] @ keys.T / np.sqrt(D), -np.inf)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        result[p, r, :, n] = weights @ values
        out = slope[p, r, :, n]
        by_weights = out @ values.T
        by_scores = weights * (by_weights - (weights * by_weights).sum(axis=1, keepdims=True))
        by_scores /= np.sqrt(D)
        gradients[0][p, r, :, n] = by_scores @ keys
        for (shared, part), of_block in zip(
            [(3, 1), (4, 2)], [by_scores.T @ q[p, r, :, n], weights.T @ out], strict=True
        ):
            gradients[shared][p, 0, head] += of_block[:S]
            gradients[part][p, r, head] += of_block[S:]
    return result, gradients


@jax.jit
def attention(case: Case, spans: jax.Array | None, visible: jax.Array) -> jax.Array:
    shared = Segment(KeyValues(case.prompt_keys, case.prompt_values), visible[:, None, None])
    own = KeyValues(case.keys, case.values)
    return causal_attention(case.queries, own, shared, spans, BLOCK)


@jax.jit
def gradients(case: Case, spans: jax.Array | None, visible: jax.Array) -> Case:
    return jax.grad(lambda x: jnp.sum(attention(x, spans, visible) * case.slope))(case)


def assert_close(found: jax.Array, expected: np.ndarray, tolerance: float = 3e-6) -> None:
    error = np.abs(np.asarray(found) - expected).max()
    assert error <= tolerance * max(1.0, np.abs(expected).max())


# A score of 100 is rounded by 4e-6, and so is its exponential.
@pytest.mark.parametrize(("scale", "tolerance"), [(1.0, 3e-6), (30.0, 3e-5)], ids=["mild", "sharp"])
@pytest.mark.parametrize(
    ("T", "S"),
    [(1, 1), (5, 3), (BLOCK, BLOCK), (BLOCK + 1, 3 * BLOCK), (50, 24), (35, 17)],
)
def test_values_and_gradients_are_the_textbooks(
    T: int, S: int, scale: float, tolerance: float
) -> None:
    """In rows of one block and of several, with a rest and without."""
    of = case(T, S, scale)
    visible = np.random.default_rng(0).random((P, S)) < 0.7
    visible[1] = False  # a prompt of one token leaves nothing to see
    expected, slopes = reference(of, np.zeros((P, R, T)), visible)
    assert_close(attention(of, None, visible), expected, tolerance)
    for found, slope in zip(gradients(of, None, visible), slopes, strict=False):
        assert_close(found, slope, tolerance)


@pytest.mark.parametrize("T", [10, 40])
def test_sequences_that_share_a_row_do_not_see_each_other(T: int) -> None:
    of, rng = case(T, 16), np.random.default_rng(1)
    spans = np.sort(rng.integers(-1, 4, (P, R, T)), axis=-1)
    visible = np.ones((P, 16), bool)
    expected, slopes = reference(of, spans, visible)
    assert_close(attention(of, spans, visible), expected)
    for found, slope in zip(gradients(of, spans, visible), slopes, strict=False):
        assert_close(found, slope)


def test_no_array_holds_a_number_for_every_pair_of_places() -> None:
    """The longest dimensions are a row's and a block's."""
    T, S = 8 * BLOCK, 3 * BLOCK
    shapes = jax.eval_shape(lambda: Case(*map(jnp.asarray, case(T, S))))
    visible = jax.ShapeDtypeStruct((P, S), jnp.bool_)
    text = gradients.lower(shapes, None, visible).compile().as_text()
    assert f",{T}," in text or f",{T}]" in text
    assert f"{T},{T}" not in text
    assert f"{T},{S}" not in text
