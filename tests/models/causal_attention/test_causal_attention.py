"""Every implementation is the textbook's attention, and so are its gradients."""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from grpo_eqx.models.causal_attention import (
    BlockedAttention,
    CausalAttention,
    CudnnAttention,
    MosaicAttention,
    Visible,
    best_attention,
)
from grpo_eqx.models.causal_attention.blocked import BlockCounts, _Level, _levels
from grpo_eqx.models.kv_cache import KeyValues
from grpo_eqx.sharding import parse_mesh

R, N, K, D = 6, 4, 2, 8
BLOCK = 16


class Case(NamedTuple):
    """Random arguments; `slope` is the gradient by the result."""

    queries: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    slope: np.ndarray


def case(T: int, scale: float = 1.0) -> Case:
    rng = np.random.default_rng(T)
    wide, of_keys = (R, T, N, D), (R, K, T, D)
    arrays = [rng.normal(size=shape) for shape in (wide, of_keys, of_keys, wide)]
    arrays[0] *= scale
    return Case(*(x.astype(np.float32) for x in arrays))


def nothing_but_itself(T: int) -> Visible:
    places = np.tile(np.arange(T, dtype=np.int32), (R, 1))
    return Visible(places, np.zeros_like(places), np.zeros_like(places))


def random_rows(T: int, seed: int = 0) -> Visible:
    """Prompts, some of no positions, each with its completions; then padding that sees itself."""
    rng = np.random.default_rng(T + seed)
    visible = nothing_but_itself(T)
    for own_start, prompt_start, prompt_end in zip(*visible, strict=True):
        at, end = 0, rng.integers(T // 2, T + 1)
        while at < end:
            prompt = slice(at, min(at + rng.integers(T // 4 + 1), end))
            own_start[prompt], at = prompt.start, prompt.stop
            for _ in range(rng.integers(1, 4)):
                completion = slice(at, min(at + rng.integers(1, T // 4 + 2), end))
                own_start[completion], at = completion.start, completion.stop
                prompt_start[completion], prompt_end[completion] = prompt.start, prompt.stop
    return visible


def mask_of(visible: Visible) -> np.ndarray:
    """What `visible` says, spelled out: whether each query of a row sees each key."""
    rows, T = visible.own_start.shape
    mask = np.zeros((rows, T, T), bool)
    for r, query in np.ndindex(rows, T):
        own_start, prompt_start, prompt_end = (int(x[r, query]) for x in visible)
        mask[r, query, own_start : query + 1] = True
        mask[r, query, prompt_start:prompt_end] = True
    return mask


def meeting_blocks(visible: Visible, queries: int, keys: int) -> np.ndarray:
    """Pairs of blocks that meet, from the mask."""
    mask = mask_of(visible)
    T = mask.shape[1]
    blocks = [
        [mask[:, i : i + queries, j : j + keys].any(axis=(1, 2)) for j in range(0, T, keys)]
        for i in range(0, T, queries)
    ]
    return np.moveaxis(np.array(blocks), -1, 0)


def pairs_of(visible: Visible, size: int) -> list[tuple[int, int]]:
    """Pairs of blocks of which any query sees any key in any row, from the mask."""
    needed = meeting_blocks(visible, size, size).any(axis=0)
    return [(i, j) for i, j in np.argwhere(needed).tolist()]


def wide_pairs_of(pairs: list[tuple[int, int]], wide: int) -> list[tuple[int, int]]:
    """Pairs of wide blocks that miss no pair of their blocks."""
    n = max(max(pair) for pair in pairs) + 1
    wide_blocks = [range(i, i + wide) for i in range(0, n, wide)]
    return [
        (i, j)
        for i, j in itertools.product(range(len(wide_blocks)), repeat=2)
        if set(itertools.product(wide_blocks[i], wide_blocks[j])) <= set(pairs)
    ]


def reference(
    case: Case, visible: Visible, softcap: float | None = None
) -> tuple[np.ndarray, list[np.ndarray]]:
    """One softmax over the keys that each query sees, in float64, and the gradients by hand."""
    q, k, v, slope = (x.astype(np.float64) for x in case)
    result, (by_q, by_k, by_v) = np.zeros_like(q), (np.zeros_like(x) for x in (q, k, v))
    mask = mask_of(visible)
    for r, n in np.ndindex(R, N):
        head = n // (N // K)
        queries, keys, values, out = q[r, :, n], k[r, head], v[r, head], slope[r, :, n]
        scores, slope_of_cap = queries @ keys.T / np.sqrt(D), 1.0
        if softcap is not None:
            scores, slope_of_cap = (
                softcap * np.tanh(scores / softcap),
                np.cosh(scores / softcap) ** -2,
            )
        scores = np.where(mask[r], scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        result[r, :, n] = weights @ values
        by_weights = out @ values.T
        by_scores = weights * (by_weights - (weights * by_weights).sum(axis=1, keepdims=True))
        by_scores *= slope_of_cap / np.sqrt(D)
        by_q[r, :, n] = by_scores @ keys
        by_k[r, head] += by_scores.T @ queries
        by_v[r, head] += weights.T @ out
    return result, [by_q, by_k, by_v]


@functools.partial(jax.jit, static_argnums=(0, 3))
def attend(
    attention: CausalAttention, case: Case, visible: Visible, softcap: float | None = None
) -> jax.Array:
    return attention(case.queries, KeyValues(case.keys, case.values), visible, softcap)


@functools.partial(jax.jit, static_argnums=(0, 3))
def result_and_gradients(
    attention: CausalAttention, case: Case, visible: Visible, softcap: float | None = None
) -> tuple[jax.Array, list[jax.Array]]:
    def run(*inputs: jax.Array) -> jax.Array:
        return attend(attention, Case(*inputs, case.slope), visible, softcap)

    result, pull = jax.vjp(run, *case[:3])
    return result, list(pull(case.slope))


def mesh_of(shape: str = "1,1,1", devices: int = 1) -> jax.sharding.Mesh:
    return parse_mesh(shape).build(jax.devices()[:devices])


def blocked(mesh: jax.sharding.Mesh) -> BlockedAttention:
    """Small blocks, on any mesh."""
    return BlockedAttention(BLOCK)


def wide_blocked(mesh: jax.sharding.Mesh) -> BlockedAttention:
    """Blocks a quarter as large; three make a wide one."""
    return BlockedAttention(BLOCK // 4, per_wide=3)


def mosaic(mesh: jax.sharding.Mesh, query_block: int = 2 * BLOCK) -> MosaicAttention:
    """Small blocks; those of keys are as small as the kernels allow."""
    return MosaicAttention(mesh, query_block=query_block, key_block=128)


def cudnn(mesh: jax.sharding.Mesh) -> CudnnAttention:
    """What cuDNN is asked for, without a GPU."""
    return CudnnAttention(mesh, "xla")


def assert_close(found: jax.Array, expected: np.ndarray, tolerance: float) -> None:
    error = np.abs(np.asarray(found, np.float64) - expected).max()
    assert error <= tolerance * max(1.0, np.abs(expected).max())


def check(
    attention: CausalAttention,
    of: Case,
    visible: Visible,
    tolerance: float = 3e-6,
    softcap: float | None = None,
) -> None:
    expected, slopes = reference(of, visible, softcap)
    result, gradients = result_and_gradients(attention, of, visible, softcap)
    assert_close(result, expected, tolerance)
    for found, slope in zip(gradients, slopes, strict=True):
        assert_close(found, slope, tolerance)


Make = Callable[[jax.sharding.Mesh], CausalAttention]

SHARP = 30.0
SHARP_TOLERANCE = 3e-5  # a score of 100 is rounded by 4e-6, and so is its exponential


@pytest.mark.parametrize("T", [1, 5, BLOCK, BLOCK + 1, 35, 4 * BLOCK])
def test_blocks_give_the_textbooks_values_and_gradients(T: int) -> None:
    """In rows of one block and of several, with a rest and without."""
    attention = BlockedAttention(BLOCK)
    check(attention, case(T), random_rows(T))
    check(attention, case(T, SHARP), random_rows(T), SHARP_TOLERANCE)


@pytest.mark.parametrize("block", [1, 7, 64])
def test_blocks_may_have_any_size(block: int) -> None:
    check(BlockedAttention(block), case(50), random_rows(50))


@pytest.mark.slow
@settings(max_examples=20)
@given(
    seed=st.integers(0, 10**6), T=st.integers(1, 70), size=st.integers(1, 9), wide=st.integers(1, 5)
)
def test_wide_blocks_give_the_textbooks_values_and_gradients(
    seed: int, T: int, size: int, wide: int
) -> None:
    check(BlockedAttention(size, wide), case(T), random_rows(T, seed))


@pytest.mark.grid
@pytest.mark.parametrize("T", [5, pytest.param(290, marks=pytest.mark.slow)])
@pytest.mark.parametrize("make", [mosaic, cudnn])
def test_kernels_give_the_textbooks_values_and_gradients(make: Make, T: int) -> None:
    """Interpreted: the same kernels that compile for TPUs."""
    attention = make(mesh_of())
    check(attention, case(T), random_rows(T))
    check(attention, case(T, SHARP), random_rows(T), SHARP_TOLERANCE)


@pytest.mark.parametrize(
    ("query_block", "T"), [(96, 150), pytest.param(400, 300, marks=pytest.mark.slow)]
)
def test_blocks_of_queries_and_keys_need_not_divide_each_other(query_block: int, T: int) -> None:
    check(mosaic(mesh_of(), query_block), case(T), random_rows(T))


@pytest.mark.grid
@pytest.mark.parametrize("make", [blocked, wide_blocked, mosaic, cudnn])
@pytest.mark.parametrize(("scale", "softcap"), [(1.0, 1.5), (SHARP, 20.0)])
def test_scores_have_a_soft_cap(make: Make, scale: float, softcap: float) -> None:
    """Of about their own size; masked ones, far below the cap, add no NaN to a gradient."""
    check(make(mesh_of()), case(40, scale), random_rows(40), SHARP_TOLERANCE, softcap)


def test_a_soft_cap_on_a_mesh() -> None:
    check(mosaic(mesh_of("2,1,2", 4)), case(20), random_rows(20), softcap=1.5)


@pytest.mark.parametrize("make", [blocked, wide_blocked, mosaic, cudnn])
def test_in_bfloat16_results_are_as_near_as_its_rounding(make: Make) -> None:
    """The dtype of TPUs and GPUs; products of rounded numbers are summed in float32."""
    of = jax.tree.map(lambda x: x.astype(jnp.bfloat16), case(40))
    check(make(mesh_of()), of, random_rows(40), tolerance=2e-2)


@pytest.mark.grid
@pytest.mark.parametrize(
    ("shape", "devices"),
    [("2,1,2", 4), ("1,3,1", 3), ("2,3,1", 6), ("1,1,4", 4)],
    ids=["rows and heads", "sharded rows", "rows over both axes", "more devices than heads"],
)
@pytest.mark.parametrize("make", [mosaic, cudnn])
def test_kernels_on_a_mesh(make: Make, shape: str, devices: int) -> None:
    check(make(mesh_of(shape, devices)), case(20), random_rows(20))


@pytest.mark.parametrize("make", [blocked, wide_blocked, mosaic, cudnn])
def test_completions_that_share_a_row_are_as_if_alone_after_their_prompt(make: Make) -> None:
    """A row of a prompt and two completions, against rows of the prompt and one of them."""
    attention, (queries, keys, values, slope) = make(mesh_of()), case(30)
    visible = nothing_but_itself(30)
    visible.own_start[:] = np.repeat([0, 10, 20], 10)
    visible.prompt_end[:, 10:] = 10
    together = attend(attention, Case(queries, keys, values, slope), visible)
    for completion in (slice(10, 20), slice(20, 30)):
        at = np.r_[:10, completion]
        alone = Case(queries[:, at], keys[:, :, at], values[:, :, at], slope[:, at])
        expected = attend(attention, alone, Visible.of_padded(jnp.ones((R, 20), bool)))
        assert_close(together[:, at], np.asarray(expected), 3e-6)


@pytest.mark.parametrize(
    ("make", "products"), [(blocked, 2 + 5), (wide_blocked, 2 + 5), (mosaic, 2 + 7)]
)
def test_blocks_that_no_query_sees_are_not_computed(
    make: Make, products: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the products of the forward and the backward pass, each of one pair of blocks."""
    T = 8 * BLOCK + 128  # of no other test, which would leave a function that is traced already
    visible, counted, einsum = random_rows(T), [], jnp.einsum

    def spied(*args: Any, **options: Any) -> jax.Array:
        jax.debug.callback(lambda: counted.append(1))
        return einsum(*args, **options)

    monkeypatch.setattr(jnp, "einsum", spied)
    jax.block_until_ready(result_and_gradients(make(mesh_of()), case(T), visible))
    jax.effects_barrier()
    if make is blocked:  # all rows and heads at once
        pairs = len(pairs_of(visible, BLOCK))
    elif make is wide_blocked:
        narrow = pairs_of(visible, BLOCK // 4)
        whole = wide_pairs_of(narrow, 3)
        assert whole
        pairs = len(whole) + sum((i // 3, j // 3) not in whole for i, j in narrow)
    else:
        pairs = K * meeting_blocks(visible, BLOCK, 128).sum()
    assert len(counted) == products * pairs


def pairs_at(level: _Level) -> list[tuple[int, int]]:
    """Pairs of a level, in the order in which they are computed."""
    bounds = ((i, level.pairs(i)) for i in level.queries[: level.number].tolist())
    return [(i, j) for i, (first, end) in bounds for j in level.keys[first:end].tolist()]


@pytest.mark.grid
@pytest.mark.parametrize(
    ("T", "size", "wide"),
    [(70, 7, 1), (70, 7, 2), (70, 4, 3), (50, 3, 5), (33, 2, 3), (70, 14, 5), (68, 14, 5)],
)
@settings(max_examples=10)
@given(seed=st.integers(0, 10**6))
def test_each_needed_pair_of_blocks_is_computed_once(
    T: int, size: int, wide: int, seed: int
) -> None:
    """And no other pair is: in wide blocks that need all of their pairs, or on its own."""
    rows = random_rows(T, seed)
    visible, needed = Visible(*map(jnp.asarray, rows)), pairs_of(rows, size)
    levels = _levels(visible.filled(size), size, wide)
    pairs = [pairs_at(level) for level in levels]
    if wide > 1 and wide * size < T:
        assert pairs[0] == wide_pairs_of(needed, wide)
    else:
        assert pairs == [needed]
    filled = -(-T // size) * size
    expected, computed = np.zeros((2, filled, filled), int)
    for i, j in needed:
        expected[i * size : (i + 1) * size, j * size : (j + 1) * size] = 1
    for level, of_level in zip(levels, pairs, strict=True):
        for i, j in of_level:
            queries, keys = (np.asarray(level.block(jnp.int32(at)).positions) for at in (i, j))
            computed[np.ix_(queries, keys)] += 1
    np.testing.assert_array_equal(computed, expected)
    counts = BlockCounts.by_width(visible, size, wide)
    assert counts == [(len({i for i, _ in each}), len(each)) for each in pairs]


def test_blocks_that_no_query_sees_are_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grids name no others, and a block that a step shares with the step before stays."""
    visible = random_rows(300)
    meets = meeting_blocks(visible, 64, 128)
    pairs: list[list[tuple[int, ...]]] = []
    launch = pl.pallas_call

    def spied(*args: Any, grid_spec: pltpu.PrefetchScalarGridSpec, **options: Any) -> Any:
        queries, keys = (spec.index_map for spec in grid_spec.in_specs[:2])

        def record(prefetched: np.ndarray) -> None:
            steps = [(*step, prefetched) for step in np.ndindex(grid_spec.grid)]
            pairs.append([(step[0], int(queries(*step)[3]), int(keys(*step)[2])) for step in steps])

        def run(prefetched: jax.Array, *inputs: jax.Array) -> Any:
            jax.debug.callback(record, prefetched)
            return launch(*args, grid_spec=grid_spec, **options)(prefetched, *inputs)

        return run

    monkeypatch.setattr(pl, "pallas_call", spied)
    attention = mosaic(mesh_of(), query_block=2 * 64)
    jax.block_until_ready(result_and_gradients(attention, case(300), visible))
    jax.effects_barrier()
    assert len(pairs) == 3
    for of_kernel in pairs:
        assert set(of_kernel) == set(zip(*np.nonzero(meets), strict=True))
        loads = 1 + sum(x != y for x, y in itertools.pairwise(of_kernel))
        assert loads <= K * meets.sum()


@pytest.mark.parametrize(("queries", "keys"), [(8, 8), (4, 12), (24, 3), (16, 20), (48, 48)])
def test_blocks_meet_where_any_query_sees_any_key(queries: int, keys: int) -> None:
    visible = random_rows(48)
    found = Visible(*map(jnp.asarray, visible)).blocks(queries, keys)
    np.testing.assert_array_equal(found, meeting_blocks(visible, queries, keys))


def test_padded_sequences_see_what_is_before_them_and_padding_sees_itself() -> None:
    left, right = [0, 0, 1, 1, 1], [1, 1, 1, 0, 0]
    visible = Visible.of_padded(jnp.array([left, right, [1] * 5, [0] * 5], bool))
    np.testing.assert_array_equal(visible.own_start[0], [0, 1, 2, 2, 2])
    np.testing.assert_array_equal(visible.own_start[1], [0, 0, 0, 3, 4])
    np.testing.assert_array_equal(visible.own_start[2], [0, 0, 0, 0, 0])
    np.testing.assert_array_equal(visible.own_start[3], [0, 1, 2, 3, 4])
    assert not (visible.prompt_start < visible.prompt_end).any()


@settings(max_examples=50)
@given(seed=st.integers(0, 10**6), window=st.integers(1, 33) | st.just(2**31 - 1))
def test_a_window_shows_the_last_positions_of_each_querys_own_sequence(
    seed: int, window: int
) -> None:
    """Counted through the prompt, wherever in the row that is."""
    visible = random_rows(32, seed)
    expected = mask_of(visible)
    for r, query in np.ndindex(R, 32):
        seen = np.flatnonzero(expected[r, query])  # its sequence up to itself, in order
        expected[r, query, seen[:-window]] = False
    windowed = Visible(*map(jnp.asarray, visible)).windowed(jnp.int32(window))
    blocks, found = windowed.blocks(8, 8), Visible(*map(np.asarray, windowed))
    np.testing.assert_array_equal(mask_of(found), expected)
    np.testing.assert_array_equal(blocks, meeting_blocks(found, 8, 8))


@pytest.mark.parametrize("make", [blocked, wide_blocked, mosaic, cudnn])
def test_attention_in_a_window(make: Make) -> None:
    windowed = Visible(*map(jnp.asarray, random_rows(40))).windowed(jnp.int32(6))
    check(make(mesh_of()), case(40), Visible(*map(np.asarray, windowed)))


def test_rows_are_filled_with_places_that_see_themselves() -> None:
    visible = Visible(*map(jnp.asarray, random_rows(13)))
    mask = mask_of(visible.filled(8))
    np.testing.assert_array_equal(mask[:, :13, :13], mask_of(visible))
    np.testing.assert_array_equal(mask[:, 13:], np.tile(np.eye(16, dtype=bool)[13:], (R, 1, 1)))
    assert not mask[:, :13, 13:].any()


def test_no_array_holds_a_number_for_every_pair_of_places() -> None:
    """The longest dimensions are a row's and a block's."""
    T = 8 * BLOCK
    arguments = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, (case(T), random_rows(T))))
    lowered = result_and_gradients.lower(BlockedAttention(BLOCK), *arguments)
    text = lowered.compile().as_text()
    assert f",{T}," in text or f",{T}]" in text
    assert f"{T},{T}" not in text


def test_cudnn_lowers_to_its_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, forward and backward; in float32 or with a soft cap, for which it has none, to
    plain JAX."""
    cudnn = "jax._src.cudnn.fused_attention_stablehlo"  # asks for a GPU while it is traced
    monkeypatch.setattr(f"{cudnn}.check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(f"{cudnn}.check_compute_capability", lambda _: True)
    monkeypatch.setattr(f"{cudnn}.is_cuda_compute_capability_equal", lambda _: False)

    def kernels(dtype: jnp.dtype, softcap: float | None = None) -> int:
        of = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), case(33))
        attention = CudnnAttention(mesh_of())
        traced = result_and_gradients.trace(attention, of, random_rows(33), softcap)
        return traced.lower(lowering_platforms=("cuda",)).as_text().count("@__cudnn$fmha")

    assert kernels(jnp.bfloat16) == 2
    assert kernels(jnp.float32) == 0
    assert kernels(jnp.bfloat16, softcap=50.0) == 0


@pytest.mark.parametrize(
    ("platform", "kind", "capability", "expected"),
    [
        ("tpu", "TPU v6 lite", None, MosaicAttention),
        ("gpu", "NVIDIA H200", "9.0", CudnnAttention),
        ("gpu", "NVIDIA B200", "10.0", CudnnAttention),
        ("gpu", "NVIDIA GeForce RTX 2080", "7.5", BlockedAttention),
        ("gpu", "AMD Instinct MI300X", "gfx942", BlockedAttention),
        ("cpu", "cpu", None, BlockedAttention),
    ],
)
def test_each_device_has_its_own(
    platform: str, kind: str, capability: str | None, expected: type
) -> None:
    device = Mock(spec=jax.Device, platform=platform, device_kind=kind)
    device.compute_capability = capability
    mesh = Mock(spec=jax.sharding.Mesh, devices=np.array([device], object))
    assert isinstance(best_attention(mesh), expected)
