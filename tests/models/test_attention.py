"""Attention over segments is attention over everything that they hold."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from grpo_eqx.models.attention import Past, Segment, attend
from grpo_eqx.models.kv_cache import CACHE_BLOCK, KeyValues, KVCache

jitted_attend = jax.jit(attend)


def assert_close(actual: Array, desired: np.ndarray | Array) -> None:
    """Equal to 1e-5 of the largest number."""
    desired = np.asarray(desired)
    np.testing.assert_allclose(actual, desired, rtol=0, atol=1e-5 * np.abs(desired).max())


def softmax_attention(
    queries: np.ndarray, keys: np.ndarray, values: np.ndarray, visible: np.ndarray
) -> np.ndarray:
    """The textbook form in float64: queries `[N, D]`, keys `[K, S, D]`, visible `[S]`."""
    N, D = queries.shape
    result = np.zeros((N, D))
    for n in range(N):
        head = n // (N // len(keys))
        scores = keys[head].astype(np.float64) @ queries[n].astype(np.float64) / np.sqrt(D)
        scores = np.where(visible, scores, -np.inf)
        weights = np.exp(scores - scores.max())
        result[n] = weights / weights.sum() @ values[head]
    return result


@pytest.mark.parametrize("scale", [1.0, 30.0], ids=["mild", "sharp"])
def test_attention_over_segments_and_past_is_attention_over_their_concatenation(
    scale: float,
) -> None:
    """A prompt's keys, each continuation's own, and a cache of several blocks at two layers."""
    P, G, N, K, D, S1, S2, S3 = 2, 3, 6, 2, 8, 5, 4, 2 * CACHE_BLOCK
    rng = np.random.default_rng(0)
    queries = (scale * rng.normal(size=(P, G, N, D))).astype(np.float32)
    shared = rng.normal(size=(2, P, 1, K, S1, D)).astype(np.float32)
    own = rng.normal(size=(2, P, G, K, S2, D)).astype(np.float32)
    cache = rng.normal(size=(2, 2, P, G, K, S3, D)).astype(np.float32)
    shared_visible = np.array([[True, False, True, True, False], [False] * 5])
    own_visible = rng.random((P, G, S2)) < 0.5
    own_visible[..., 0] = True
    place = np.array([[0, 3, CACHE_BLOCK], [CACHE_BLOCK + 1, 200, 7]])
    attended = jitted_attend(
        jnp.asarray(queries),
        [
            Segment(KeyValues(*map(jnp.asarray, shared)), jnp.asarray(shared_visible)[:, None]),
            Segment(KeyValues(*map(jnp.asarray, own)), jnp.asarray(own_visible)),
        ],
        Past(KVCache(*map(jnp.asarray, cache)), jnp.int32(1), jnp.asarray(place), jnp.int32(200)),
    )
    for p, g in np.ndindex(P, G):
        before = np.arange(S3) < place[p, g]
        seen = np.concatenate([shared_visible[p], own_visible[p, g], before])
        keys, values = np.concatenate([shared[:, p, 0], own[:, p, g], cache[:, 1, p, g]], axis=2)
        assert_close(attended[p, g], softmax_attention(queries[p, g], keys, values, seen))


def test_the_order_and_number_of_segments_do_not_matter() -> None:
    P, G, N, K, D, S = 2, 3, 6, 2, 8, 6
    rng = np.random.default_rng(1)
    queries = jnp.asarray(rng.normal(size=(P, G, N, D)), jnp.float32)
    keys, values = jnp.asarray(rng.normal(size=(2, P, G, K, S, D)), jnp.float32)
    visible = jnp.asarray(rng.random((P, G, S)) < 0.5).at[..., 0].set(True)

    def part(start: int, stop: int) -> Segment:
        kv = KeyValues(keys[..., start:stop, :], values[..., start:stop, :])
        return Segment(kv, visible[..., start:stop])

    whole = jitted_attend(queries, [part(0, S)])
    assert_close(jitted_attend(queries, [part(0, 2), part(2, S)]), whole)
    assert_close(jitted_attend(queries, [part(3, S), part(1, 3), part(0, 1)]), whole)


def test_a_query_that_sees_nothing_stays_finite() -> None:
    kv = KeyValues(jnp.ones((1, 1, 1, 3, 4)), jnp.ones((1, 1, 1, 3, 4)))
    nothing = jnp.zeros((1, 1, 3), bool)
    attended = jitted_attend(jnp.ones((1, 1, 2, 4)), [Segment(kv, nothing)])
    assert np.isfinite(attended).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_a_cache_gives_back_what_its_dtype_can_hold(dtype: str) -> None:
    kv = KeyValues(*jnp.asarray(np.random.default_rng(0).normal(size=(2, 2, 1, 3, 5, 8)), "f4"))
    kv = jax.tree.map(lambda x: x.at[0, 0, 0, 0].set(0), kv)  # a key of zeros has no scale
    cache = KVCache.of(kv, jnp.dtype(dtype))
    assert cache.keys.dtype == cache.values.dtype == dtype
    step = {"float32": 0.0, "bfloat16": 2**-7, "int8": 1 / 127}[dtype]
    for found, given in zip(cache.loaded(jnp.dtype("float32")), kv, strict=True):
        assert found.dtype == jnp.float32
        largest = jnp.abs(given).max(axis=-1, keepdims=True)
        assert (jnp.abs(found - given) <= step / 2 * largest * 1.001).all()
