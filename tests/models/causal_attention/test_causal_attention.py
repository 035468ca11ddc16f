"""Every implementation is the textbook's attention, and so are its gradients."""

import functools
from collections.abc import Callable
from typing import NamedTuple
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_eqx.models.attention import Segment
from grpo_eqx.models.causal_attention import (
    BlockedAttention,
    CausalAttention,
    CudnnAttention,
    MosaicAttention,
    best_attention,
)
from grpo_eqx.models.kv_cache import KeyValues
from grpo_eqx.sharding import parse_mesh

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


@functools.partial(jax.jit, static_argnums=0)
def attend(
    attention: CausalAttention, case: Case, spans: jax.Array | None, visible: jax.Array
) -> jax.Array:
    shared = Segment(KeyValues(case.prompt_keys, case.prompt_values), visible[:, None])
    own = KeyValues(case.keys, case.values)
    return attention(case.queries, own, shared, spans)


@functools.partial(jax.jit, static_argnums=0)
def gradients(
    attention: CausalAttention, case: Case, spans: jax.Array | None, visible: jax.Array
) -> Case:
    return jax.grad(lambda x: jnp.sum(attend(attention, x, spans, visible) * case.slope))(case)


def mesh_of(shape: str = "1,1,1", devices: int = 1) -> jax.sharding.Mesh:
    return parse_mesh(shape).build(jax.devices()[:devices])


def mosaic(mesh: jax.sharding.Mesh, query_block: int = 2 * BLOCK) -> MosaicAttention:
    """Small blocks; those of keys are as small as the kernels allow."""
    return MosaicAttention(mesh, query_block=query_block, key_block=128)


def cudnn(mesh: jax.sharding.Mesh) -> CudnnAttention:
    """What cuDNN is asked for, without a GPU."""
    return CudnnAttention(mesh, "xla")


def assert_close(found: jax.Array, expected: np.ndarray, tolerance: float = 3e-6) -> None:
    error = np.abs(np.asarray(found, np.float64) - expected).max()
    assert error <= tolerance * max(1.0, np.abs(expected).max())


def check(attention: CausalAttention, of: Case, spans: np.ndarray | None, seed: int) -> None:
    visible = np.random.default_rng(seed).random((P, of.prompt_keys.shape[3])) < 0.7
    visible[1] = False  # a prompt of one token leaves nothing to see
    expected, slopes = reference(
        of, np.zeros((P, R, of.queries.shape[2])) if spans is None else spans, visible
    )
    # A score of 100 is rounded by 4e-6, and so is its exponential.
    tolerance = 3e-5 if np.abs(of.queries).max() > 30 else 3e-6
    assert_close(attend(attention, of, spans, visible), expected, tolerance)
    for found, slope in zip(gradients(attention, of, spans, visible), slopes, strict=False):
        assert_close(found, slope, tolerance)


def random_spans(T: int) -> np.ndarray:
    """Sequences that share rows, and places of none."""
    return np.sort(np.random.default_rng(T).integers(-1, 4, (P, R, T)), axis=-1)


@pytest.mark.parametrize("scale", [1.0, 30.0], ids=["mild", "sharp"])
@pytest.mark.parametrize(
    ("T", "S"),
    [(1, 1), (5, 3), (BLOCK, BLOCK), (BLOCK + 1, 3 * BLOCK), (50, 24), (35, 17)],
)
def test_blocks_give_the_textbooks_values_and_gradients(T: int, S: int, scale: float) -> None:
    """In rows of one block and of several, with a rest and without."""
    check(BlockedAttention(BLOCK), case(T, S, scale), None, seed=0)


@pytest.mark.parametrize("T", [10, 40])
def test_sequences_that_share_a_row_do_not_see_each_other(T: int) -> None:
    check(BlockedAttention(BLOCK), case(T, 16), random_spans(T), seed=1)


@pytest.mark.parametrize(("T", "S"), [(5, 3), pytest.param(150, 140, marks=pytest.mark.slow)])
@pytest.mark.parametrize("make", [mosaic, cudnn])
def test_kernels_give_the_textbooks_values_and_gradients(
    make: Callable[[jax.sharding.Mesh], CausalAttention], T: int, S: int
) -> None:
    """Interpreted: the same kernels that compile for TPUs."""
    attention = make(mesh_of())
    check(attention, case(T, S, 30.0), None, seed=2)
    check(attention, case(T, S), random_spans(T), seed=3)


@pytest.mark.parametrize(
    ("query_block", "T"), [(96, 150), pytest.param(400, 300, marks=pytest.mark.slow)]
)
def test_blocks_of_queries_and_keys_need_not_divide_each_other(query_block: int, T: int) -> None:
    check(mosaic(mesh_of(), query_block), case(T, 10), random_spans(T), seed=5)


@pytest.mark.parametrize("make", [lambda _: BlockedAttention(BLOCK), mosaic, cudnn])
def test_in_bfloat16_results_are_as_near_as_its_rounding(
    make: Callable[[jax.sharding.Mesh], CausalAttention],
) -> None:
    """The dtype of TPUs and GPUs; products of rounded numbers are summed in float32."""
    of = jax.tree.map(lambda x: x.astype(jnp.bfloat16), case(40, 20))
    visible = np.ones((P, 20), bool)
    expected, slopes = reference(of, np.zeros((P, R, 40)), visible)
    attention = make(mesh_of())
    assert_close(attend(attention, of, None, visible), expected, 2e-2)
    for found, slope in zip(gradients(attention, of, None, visible), slopes, strict=False):
        assert_close(found, slope, 2e-2)


@pytest.mark.parametrize(
    ("shape", "devices"),
    [("2,1,2", 4), ("1,3,1", 3), ("2,3,1", 6), ("1,1,4", 4)],
    ids=["prompts and heads", "rows", "prompts and rows", "more devices than heads"],
)
@pytest.mark.parametrize("make", [mosaic, cudnn])
def test_kernels_on_a_mesh(
    make: Callable[[jax.sharding.Mesh], CausalAttention], shape: str, devices: int
) -> None:
    check(make(mesh_of(shape, devices)), case(20, 10), random_spans(20), seed=4)


@pytest.mark.parametrize("shape", ["1,1,1", "2,1,2"])
def test_without_a_prompt(shape: str) -> None:
    """A prompt whose every key is hidden is the same as none, also to gradients."""
    of, spans = case(40, 1), jnp.asarray(random_spans(40))
    nothing = np.zeros((P, 1), bool)
    expected, slopes = reference(of, np.asarray(spans), nothing)
    mesh = mesh_of(shape, 4 if shape == "2,1,2" else 1)
    for attention in (BlockedAttention(BLOCK), mosaic(mesh), cudnn(mesh)):

        @jax.jit
        def alone(
            q: jax.Array, own: KeyValues, attention: CausalAttention = attention
        ) -> jax.Array:
            return attention(q, own, None, spans)

        own = KeyValues(jnp.asarray(of.keys), jnp.asarray(of.values))
        found, pull = jax.vjp(alone, jnp.asarray(of.queries), own)
        assert_close(found, expected)
        for gradient, slope in zip(jax.tree.leaves(pull(of.slope)), slopes, strict=False):
            assert_close(gradient, slope)


def test_no_array_holds_a_number_for_every_pair_of_places() -> None:
    """The longest dimensions are a row's and a block's."""
    T, S = 8 * BLOCK, 3 * BLOCK
    shapes = jax.eval_shape(lambda: Case(*map(jnp.asarray, case(T, S))))
    visible = jax.ShapeDtypeStruct((P, S), jnp.bool_)
    lowered = gradients.lower(BlockedAttention(BLOCK), shapes, None, visible)
    text = lowered.compile().as_text()
    assert f",{T}," in text or f",{T}]" in text
    assert f"{T},{T}" not in text
    assert f"{T},{S}" not in text


def test_cudnn_lowers_to_its_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, forward and backward; in float32, for which it has none, to plain JAX."""
    cudnn = "jax._src.cudnn.fused_attention_stablehlo"  # asks for a GPU while it is traced
    monkeypatch.setattr(f"{cudnn}.check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(f"{cudnn}.check_compute_capability", lambda _: True)
    monkeypatch.setattr(f"{cudnn}.is_cuda_compute_capability_equal", lambda _: False)

    def kernels(dtype: jnp.dtype) -> int:
        of = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), case(33, 7))
        visible = jax.ShapeDtypeStruct((P, 7), jnp.bool_)
        traced = gradients.trace(CudnnAttention(mesh_of()), of, None, visible)
        return traced.lower(lowering_platforms=("cuda",)).as_text().count("@__cudnn$fmha")

    assert kernels(jnp.bfloat16) == 2
    assert kernels(jnp.float32) == 0


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
