"""Attention over a prompt and a completion is attention over everything that they hold."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from grpo_eqx.generation.cpu import KeysByElement
from grpo_eqx.models.attention import OwnKeys, Segment, attend
from grpo_eqx.models.kv_cache import CACHE_BLOCK, GrowingCache, KeyValues, KVCache, StoredKV

jitted_attend = jax.jit(attend, static_argnames="softcap")
in_both_forms = pytest.mark.parametrize(
    "positions_last", [False, True], ids=["elements_last", "positions_last"]
)


def assert_close(actual: Array, desired: np.ndarray | Array) -> None:
    """Equal to 1e-5 of the largest number."""
    desired = np.asarray(desired)
    np.testing.assert_allclose(actual, desired, rtol=0, atol=1e-5 * np.abs(desired).max())


def in_form(cache: StoredKV, is_positions_last: bool) -> KVCache:
    return KeysByElement.of(cache) if is_positions_last else cache


def cut(whole: GrowingCache) -> GrowingCache:
    """A cache of a single part in as many as CPUs cut it into."""
    (part,) = whole.parts
    like = part if isinstance(part, KeysByElement) else KeysByElement.of(part)
    sizes = [each.num_positions for each in like.growing(1, 1, whole.length).parts]
    starts = [CACHE_BLOCK * i for i in range(len(sizes))]
    return GrowingCache(
        tuple(
            part.mapped(lambda x, axis, i=i, n=n: jax.lax.slice_in_dim(x, i, i + n, axis=axis))
            for i, n in zip(starts, sizes, strict=True)
        )
    )


def by_position(cache: KVCache) -> list[Array]:
    """The arrays of a cache in either form, positions before elements."""
    of_keys = cache.keys, cache.key_scales
    keys = jax.tree.map(lambda x: jnp.moveaxis(x, cache.key_axis, -2), of_keys)
    return jax.tree.leaves((keys[0], cache.values, keys[1], cache.value_scales))


def softmax_attention(
    queries: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    visible: np.ndarray,
    softcap: float | None = None,
) -> np.ndarray:
    """The textbook form in float64: queries `[N, D]`, keys `[K, S, D]`, visible `[S]`."""
    N, D = queries.shape
    result = np.zeros((N, D))
    for n in range(N):
        head = n // (N // len(keys))
        scores = keys[head].astype(np.float64) @ queries[n].astype(np.float64) / np.sqrt(D)
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        scores = np.where(visible, scores, -np.inf)
        weights = np.exp(scores - scores.max())
        result[n] = weights / weights.sum() @ values[head]
    return result


@in_both_forms
@pytest.mark.grid
@pytest.mark.parametrize("head_multiple", [1, 16], ids=["as_computed", "filled"])
@pytest.mark.parametrize("shares_prompt", [True, False], ids=["shared", "prompt_each"])
@pytest.mark.parametrize(
    ("length", "is_cut"),
    [(7, False), (2 * CACHE_BLOCK, False), (2 * CACHE_BLOCK, True), (6 * CACHE_BLOCK, True)],
    ids=["one_block", "two_blocks", "two_parts", "last_part_of_several_blocks"],
)
@pytest.mark.parametrize("is_rounded", [False, True], ids=["exact", "rounded"])
@pytest.mark.parametrize("scale", [1.0, 30.0], ids=["mild", "sharp"])
def test_attention_over_prompt_and_completion_is_attention_over_their_concatenation(
    scale: float,
    is_rounded: bool,
    length: int,
    is_cut: bool,
    shares_prompt: bool,
    head_multiple: int,
    positions_last: bool,
) -> None:
    """Also for a query that sees nothing of its prompt; the cache has two layers.

    Where the cache is rounded, a query's own key is not. Zeros after the heads change nothing.
    """
    P, G, N, K, D, Tp = 2, 3, 6, 2, 8, 5
    rng = np.random.default_rng(0)
    queries = (scale * rng.normal(size=(P, G, N, D))).astype(np.float32)
    prompt = rng.normal(size=(2, P, 1 if shares_prompt else G, K, Tp, D)).astype(np.float32)
    cache = rng.normal(size=(2, 2, P, G, K, length, D)).astype(np.float32)
    visible = np.array([[True, False, True, True, False], [False] * 5])
    position = np.array([[0, 3, length // 2], [length // 2 + 1, length - 2, 4]])
    new = rng.normal(size=(2, P, G, K, 1, D)).astype(np.float32)
    stored = StoredKV.of(
        KeyValues(*jnp.asarray(cache)).filled(head_multiple),
        jnp.dtype("bfloat16" if is_rounded else "f4"),
    )
    stored = in_form(stored, positions_last)
    places = jnp.asarray(position)[..., None]
    stored = stored.written(KeyValues(*jnp.asarray(new)), jnp.int32(1), places)
    cache = np.stack(by_position(stored.loaded(jnp.dtype("float32"))))[..., :D]
    own_cache = GrowingCache((stored,))
    attended = jitted_attend(
        jnp.asarray(queries)[:, :, None],
        Segment(
            in_form(
                StoredKV(*KeyValues(*jnp.asarray(prompt)).filled(head_multiple)), positions_last
            ),
            jnp.asarray(visible)[:, None, None],
        ),
        OwnKeys(
            cut(own_cache) if is_cut else own_cache,
            jnp.int32(1),
            places,
            jnp.int32(length - 1),
            KeyValues(*map(jnp.asarray, new)),
        ),
    )
    for p, g in np.ndindex(P, G):
        seen = np.concatenate([visible[p], np.arange(length) <= position[p, g]])
        own_prompt, own = prompt[:, p, 0 if shares_prompt else g], np.array(cache[:, 1, p, g])
        own[:, :, position[p, g]] = new[:, p, g, :, 0]
        keys, values = np.concatenate([own_prompt, own], axis=2)
        assert_close(attended[p, g, 0], softmax_attention(queries[p, g], keys, values, seen))


@pytest.mark.grid
@pytest.mark.parametrize("shares_prompt", [True, False], ids=["shared", "prompt_each"])
@pytest.mark.parametrize(
    ("is_cut", "positions_last"),
    [(False, False), (True, False), (True, True)],
    ids=["whole", "cut", "cut_positions_last"],
)
@pytest.mark.parametrize("window", [1, 4, CACHE_BLOCK, 2**31 - 1])
def test_attention_with_a_soft_cap_and_a_window(
    window: int, is_cut: bool, positions_last: bool, shares_prompt: bool
) -> None:
    """The prompt's part of the window differs by completion; queries are in both blocks."""
    P, G, N, K, D, Tp, length = 2, 3, 6, 2, 8, 5, 2 * CACHE_BLOCK
    rng = np.random.default_rng(window)
    queries = 5 * rng.normal(size=(P, G, N, D)).astype(np.float32)
    prompt = rng.normal(size=(2, P, 1 if shares_prompt else G, K, Tp, D)).astype(np.float32)
    cache = rng.normal(size=(2, 1, P, G, K, length, D)).astype(np.float32)
    position = np.array([[0, 2, length // 2], [length // 2 + 1, length - 2, 4]])
    visible = np.arange(Tp) + window > Tp + position[..., None]
    own = KeyValues(*jnp.asarray(cache))
    own_cache = GrowingCache((in_form(StoredKV(*own), positions_last),))
    attended = jitted_attend(
        jnp.asarray(queries)[:, :, None],
        Segment(
            in_form(StoredKV(*jnp.asarray(prompt)), positions_last),
            jnp.asarray(visible)[:, :, None],
        ),
        OwnKeys(
            cut(own_cache) if is_cut else own_cache,
            jnp.int32(0),
            jnp.asarray(position)[..., None],
            jnp.int32(length - 1),
            KeyValues(*(x[0, :, :, :, :1] for x in own)),  # read of a rounded cache only
            jnp.int32(window),
        ),
        softcap=3.0,
    )
    places = np.arange(length)
    for p, g in np.ndindex(P, G):
        at = position[p, g]
        seen = np.concatenate([visible[p, g], (places <= at) & (places + window > at)])
        own_prompt = prompt[:, p, 0 if shares_prompt else g]
        keys, values = np.concatenate([own_prompt, cache[:, 0, p, g]], axis=2)
        assert_close(attended[p, g, 0], softmax_attention(queries[p, g], keys, values, seen, 3.0))


@in_both_forms
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_a_written_cache_differs_where_it_was_written(dtype: str, positions_last: bool) -> None:
    L, P, G, K, S, D = 3, 2, 3, 2, 5, 8
    rng = np.random.default_rng(2)
    old = KeyValues(*jnp.asarray(rng.normal(size=(2, L, P, G, K, S, D)), "f4"))
    new = KeyValues(*jnp.asarray(rng.normal(size=(2, P, G, K, 2, D)), "f4"))
    positions = np.array([[[0, 1], [4, 5], [2, 3]], [[1, 2], [1, 9], [3, 0]]])  # 5, 9: past the end
    cache, of_new = StoredKV.of(old, jnp.dtype(dtype)), StoredKV.of(new, jnp.dtype(dtype))
    cache = in_form(cache, positions_last)
    written = cache.written(new, jnp.int32(1), jnp.asarray(positions))
    assert type(written) is type(cache)
    for found, before, tokens in zip(*map(by_position, (written, cache, of_new)), strict=True):
        expected = np.array(before)
        for (p, g, t), position in np.ndenumerate(positions):
            if position < S:
                expected[1, p, g, :, position] = tokens[p, g, :, t]
        np.testing.assert_array_equal(found, expected)


@in_both_forms
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_a_cache_gives_back_what_its_dtype_can_hold(dtype: str, positions_last: bool) -> None:
    kv = KeyValues(*jnp.asarray(np.random.default_rng(0).normal(size=(2, 2, 1, 3, 5, 8)), "f4"))
    kv = jax.tree.map(lambda x: x.at[0, 0, 0, 0].set(0), kv)  # a key of zeros has no scale
    cache = in_form(StoredKV.of(kv, jnp.dtype(dtype)), positions_last)
    assert cache.keys.dtype == cache.values.dtype == dtype
    step = {"float32": 0.0, "bfloat16": 2**-7, "int8": 1 / 127}[dtype]
    for found, given in zip(by_position(cache.loaded(jnp.dtype("float32"))), kv, strict=True):
        assert found.dtype == jnp.float32
        largest = jnp.abs(given).max(axis=-1, keepdims=True)
        assert (jnp.abs(found - given) <= step / 2 * largest * 1.001).all()


@in_both_forms
@pytest.mark.parametrize("length", [CACHE_BLOCK // 2, 3 * CACHE_BLOCK, 12 * CACHE_BLOCK])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_cut_cache_is_written_where_the_whole_one_is(
    dtype: str, length: int, positions_last: bool
) -> None:
    P, G, K, D = 2, 4, 1, 2
    rng = np.random.default_rng(3)
    old = KeyValues(*jnp.asarray(rng.normal(size=(2, 1, P, G, K, length, D)), "f4"))
    new = KeyValues(*jnp.asarray(rng.normal(size=(2, P, G, K, 1, D)), "f4"))
    position = jnp.asarray(
        [[0, length - 1, length // 2, length // 3], rng.integers(length, size=G)]
    )
    position = position[..., None]
    whole = GrowingCache((in_form(StoredKV.of(old, jnp.dtype(dtype)), positions_last),))
    expected = cut(whole.written(new, jnp.int32(0), position))
    found = cut(whole).written(new, jnp.int32(0), position)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert found.length == length
    assert [start for start, _ in found.placed()] == [
        CACHE_BLOCK * i for i in range(len(found.parts))
    ]
