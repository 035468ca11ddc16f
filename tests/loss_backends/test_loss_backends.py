"""Every backend against a float64 reference: values and gradients, on one device and on meshes."""

import dataclasses
import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import Array, Float, Int

from grpo_eqx.common.errors import UserError
from grpo_eqx.loss_backends import (
    ChunkedLoss,
    DenseLoss,
    LossBackend,
    PallasLoss,
    TokenStats,
    stats_of_logits,
)
from grpo_eqx.loss_backends.pallas.gpu import TritonKernels
from grpo_eqx.loss_backends.pallas.kernels import BlockSizes, KernelTiles
from grpo_eqx.loss_backends.softmax import ScoreGradient
from grpo_eqx.loss_backends.tiled import STRIP, tile_size
from grpo_eqx.models.product import product
from grpo_eqx.models.softcap import soft_capped
from grpo_eqx.sharding import parse_mesh
from grpo_eqx.sharding.rules import batch_sharding, parameter_sharding


class FromLogits(LossBackend):
    """The operation on logits that exist already, as a backend."""

    def token_stats(
        self,
        hidden: Float[Array, "*batch T H"],
        head: Float[Array, "V H"],
        ids: Int[Array, "*batch T"],
        temperature: float,
        mesh: jax.sharding.Mesh | None,
        softcap: float | None,
    ) -> TokenStats:
        logits = product("...th,vh->...tv", hidden, head.astype(hidden.dtype))
        logits = soft_capped(logits, softcap)
        return stats_of_logits(logits, ids, temperature)


BACKENDS = {
    "dense": DenseLoss(),
    "logits": FromLogits(),
    "chunked": ChunkedLoss(),
    "chunked 7x16": ChunkedLoss(token_tile=7, vocabulary_tile=16),
    "chunked 16x11": ChunkedLoss(token_tile=16, vocabulary_tile=11),
    # interpreted: the same kernels that compile for TPUs and GPUs
    "pallas tpu": PallasLoss(kernels="tpu", token_tile=50, vocabulary_tile=33),
    "pallas gpu": PallasLoss(kernels="gpu", token_tile=50, vocabulary_tile=33),
    "pallas small blocks": PallasLoss(
        kernels="gpu",
        token_tile=50,
        vocabulary_tile=33,
        token_block=16,
        vocabulary_block=16,
        hidden_block=16,
    ),
}
PROMPTS, GROUP, LENGTH, HIDDEN = 4, 4, 5, 24
VOCAB = 44  # splits over 2 and 4 devices; into whole tiles of 11, not of 16
SHAPE = (PROMPTS, GROUP, LENGTH)
CASES = ["random", "logits of 80", "one-hot", "equal", "ignored"]


class Inputs:
    """Hidden states, head and ids of a case, and cotangents for every output."""

    hidden: Float[Array, "P G T H"]
    head: Float[Array, "V H"]
    ids: Int[Array, "P G T"]
    cotangents: TokenStats

    def __init__(
        self,
        case: str,
        seed: int = 0,
        vocabulary: int = VOCAB,
        shape: tuple[int, ...] = SHAPE,
        hidden_size: int = HIDDEN,
    ):
        rng = np.random.default_rng(seed)
        hidden = rng.normal(size=(*shape, hidden_size)) / hidden_size**0.5
        head = rng.normal(size=(vocabulary, hidden_size))
        ids = rng.integers(vocabulary, size=shape)
        if case == "logits of 80":
            logits = hidden @ head.T
            hidden *= 80 / np.abs(logits).max(axis=-1, keepdims=True)
        elif case == "one-hot":
            # Each token's own logit, or another one, is 80 above the rest.
            winners = np.where(rng.random(shape) < 0.5, ids, rng.integers(vocabulary, size=shape))
            hidden = 80 * head[winners] / (head[winners] ** 2).sum(axis=-1, keepdims=True)
        elif case == "equal":
            head[:] = head[0]
        elif case == "ignored":
            ids = np.where(rng.random(shape) < 0.3, -100, ids)
            ids[0, 0, 0] = vocabulary
        if case in ("logits of 80", "one-hot"):
            # So few bits that float32 products are exact in any order. Else what they round away of
            # logits this large (1e-5), which no backend can help, is all that one would see.
            hidden, head = (np.round(x * 64) / 64 for x in (hidden, head))
        self.hidden = jnp.asarray(hidden, jnp.float32)
        self.head = jnp.asarray(head, jnp.float32)
        self.ids = jnp.asarray(ids, jnp.int32)
        self.cotangents = TokenStats(
            *(jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(3))
        )

    def reference(
        self, temperature: float, softcap: float | None = None
    ) -> tuple[TokenStats, tuple[np.ndarray, np.ndarray]]:
        """The statistics, and their gradients for hidden states and head, by hand in float64."""
        hidden, head = np.asarray(self.hidden, np.float64), np.asarray(self.head, np.float64)
        ids = np.asarray(self.ids)
        counted = (ids >= 0) & (ids < len(head))
        logits, slope_of_cap = hidden @ head.T, 1.0
        if softcap is not None:
            logits, slope_of_cap = (
                softcap * np.tanh(logits / softcap),
                np.cosh(logits / softcap) ** -2,
            )
        logits = logits / temperature
        top = logits.max(axis=-1, keepdims=True)
        logsumexps = (top + np.log(np.exp(logits - top).sum(axis=-1, keepdims=True)))[..., 0]
        logprobs = logits - logsumexps[..., None]
        probs = np.exp(logprobs)
        chosen = np.where(counted, ids, 0)
        logps = np.take_along_axis(logprobs, chosen[..., None], axis=-1)[..., 0]
        entropies = -(probs * logprobs).sum(axis=-1)
        g = [np.where(counted, np.asarray(x, np.float64), 0)[..., None] for x in self.cotangents]
        dz = g[0] * (np.eye(len(head))[chosen] - probs)
        dz -= g[1] * probs * (logprobs + entropies[..., None])
        dz = (dz + g[2] * probs) * slope_of_cap / temperature
        stats = TokenStats(*(np.where(counted, x, 0) for x in (logps, entropies, logsumexps)))
        return stats, (dz @ head, np.tensordot(dz, hidden, (range(ids.ndim),) * 2))


@functools.cache
def program(
    backend: LossBackend,
    temperature: float,
    mesh: jax.sharding.Mesh | None,
    softcap: float | None,
) -> Callable[..., tuple[TokenStats, tuple[Array, Array]]]:
    """The statistics and their gradients, compiled once for all cases."""

    @jax.jit
    def run(
        hidden: Array, head: Array, ids: Array, cotangents: TokenStats
    ) -> tuple[TokenStats, tuple[Array, Array]]:
        def stats_of(hidden: Array, head: Array) -> TokenStats:
            return backend(hidden, head, ids, temperature, mesh, softcap)

        stats, pull = jax.vjp(stats_of, hidden, head)
        return stats, pull(cotangents)

    return run


def stats_and_gradients(
    backend: LossBackend,
    inputs: Inputs,
    temperature: float,
    mesh: jax.sharding.Mesh | None = None,
    softcap: float | None = None,
) -> tuple[TokenStats, tuple[Array, Array]]:
    hidden, head = inputs.hidden, inputs.head
    if mesh is not None:
        hidden = jax.device_put(hidden, batch_sharding(mesh, PROMPTS, GROUP))
        sharding = parameter_sharding(mesh, ("vocab", "hidden"), head.shape)
        head = jax.device_put(head, sharding)
    run = program(backend, temperature, mesh, softcap)
    return run(hidden, head, inputs.ids, inputs.cotangents)


def assert_close(
    found: Array, expected: np.ndarray, bound: float, size: float | np.ndarray
) -> None:
    """Equal within `bound` of `size`, or of 1 where that is smaller."""
    size = np.maximum(1.0, np.abs(size))
    np.testing.assert_allclose(np.asarray(found, np.float64) / size, expected / size, atol=bound)


def check(
    backend: LossBackend,
    inputs: Inputs,
    temperature: float,
    mesh: jax.sharding.Mesh | None = None,
    bounds: tuple[float, float] = (1e-5, 1e-5),
    softcap: float | None = None,
) -> None:
    stats, gradients = stats_and_gradients(backend, inputs, temperature, mesh, softcap)
    expected_stats, expected_gradients = inputs.reference(temperature, softcap)
    for found, expected in zip(stats, expected_stats, strict=True):
        assert found.dtype == jnp.float32
        assert_close(found, expected, bounds[0], size=expected)
    for found, expected in zip(gradients, expected_gradients, strict=True):
        assert_close(found, expected, bounds[1], size=np.abs(expected).max())


# The case changes fastest, so that a program compiled for one is there for the next.
@pytest.mark.grid
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_the_float64_reference(
    backend: LossBackend, case: str, temperature: float
) -> None:
    check(backend, Inputs(case), temperature)


@pytest.mark.grid
@pytest.mark.parametrize(
    ("mesh", "temperature"),
    [
        ("2,1,4", 0.3),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [("1,1,2", 2.0), ("2,4,1", 1.0)]),
        *(pytest.param(*case, marks=pytest.mark.long) for case in [("1,1,2", 0.3), ("1,2,4", 2.0)]),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_on_meshes_too_with_the_vocabulary_in_two_and_four_parts(
    backend: LossBackend, case: str, temperature: float, mesh: str
) -> None:
    strategy = parse_mesh(mesh)
    devices = jax.devices()[: int(np.prod([int(size) for size in mesh.split(",")]))]
    check(backend, Inputs(case), temperature, strategy.build(devices))


@pytest.mark.grid
@pytest.mark.parametrize("mesh", [None, "2,1,4"])
@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
def test_logits_have_a_soft_cap_before_the_temperature(
    backend: LossBackend, mesh: str | None
) -> None:
    """Of the size of the logits, and far below them."""
    devices = None if mesh is None else parse_mesh(mesh).build(jax.devices()[:8])
    for case in ("random", "logits of 80", "ignored"):
        check(backend, Inputs(case), 0.7, devices, softcap=2.0)


@functools.cache
def gradient_of_hidden(
    backend: LossBackend, fields: tuple[str, ...], mesh: jax.sharding.Mesh | None, softcap: float
) -> Callable[..., Array]:
    """The gradient with a constant head, for cotangents of some statistics."""

    @jax.jit
    def run(hidden: Array, head: Array, ids: Array, cotangents: TokenStats) -> Array:
        def loss(hidden: Array) -> Array:
            stats = backend(hidden, head, ids, 0.7, mesh, softcap)
            return sum(jnp.vdot(getattr(stats, x), getattr(cotangents, x)) for x in fields)

        return jax.grad(loss)(hidden)

    return run


@pytest.mark.grid
@pytest.mark.parametrize("mesh", [None, "2,1,4"])
@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_frozen_head_changes_no_gradient_of_the_hidden_states(
    backend: LossBackend, dtype: jnp.dtype, mesh: str | None
) -> None:
    """Neither that of log-probs alone, which needs no second pass, nor that of all statistics."""
    devices = None if mesh is None else parse_mesh(mesh).build(jax.devices()[:8])
    for case, softcap in itertools.product(CASES, [None, 2.0]):
        inputs = Inputs(case)
        inputs.hidden = inputs.hidden.astype(dtype)
        inputs.head = inputs.head.astype(dtype).astype(jnp.float32)
        given = inputs.cotangents
        for fields in (("logps",), TokenStats._fields):
            used = {name: getattr(given, name) for name in fields}
            zero = jnp.zeros(inputs.ids.shape, jnp.float32)
            inputs.cotangents = TokenStats(*(used.get(x, zero) for x in TokenStats._fields))
            run = gradient_of_hidden(backend, fields, devices, softcap)
            found = run(inputs.hidden, inputs.head, inputs.ids, inputs.cotangents)
            expected = inputs.reference(0.7, softcap)[1][0]
            size = np.abs(expected).max()
            if dtype == jnp.bfloat16:  # rounded parts of this size may add up to nothing
                part = np.abs(inputs.head).max() * np.abs(inputs.cotangents).max()
                size = max(size, part * (1 if len(fields) == 1 else np.log(VOCAB)))
            assert_close(found, expected, 1e-5 if dtype == jnp.float32 else 2**-7, size)


def num_products(
    backend: ChunkedLoss, *, trains_head: bool = True, mesh: jax.sharding.Mesh | None = None
) -> int:
    """Products in values and gradients of log-probs."""
    inputs = Inputs("random")

    def loss(hidden: Array, head: Array) -> Array:
        return backend(hidden, head, inputs.ids, 1.0, mesh).logps.sum()

    gradient = jax.grad(loss, argnums=(0, 1) if trains_head else 0)
    return str(jax.make_jaxpr(gradient)(inputs.hidden, inputs.head)).count("dot_general[")


@pytest.mark.parametrize("mesh", [None, "2,1,4"])
def test_a_frozen_head_needs_no_second_pass(mesh: str | None) -> None:
    """The logits, again in the backward pass of a trained head, and the gradients."""
    devices = None if mesh is None else parse_mesh(mesh).build(jax.devices()[:8])
    assert num_products(ChunkedLoss(), mesh=devices) == 4
    assert num_products(ChunkedLoss(), trains_head=False, mesh=devices) == 2


@pytest.mark.grid
@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
def test_a_vocabulary_that_the_axis_does_not_divide_stays_whole(backend: LossBackend) -> None:
    check(backend, Inputs("random", vocabulary=43), 1.0, parse_mesh("1,4,2").build())


@pytest.mark.grid
@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_bfloat16_hidden_states_lose_what_rounding_them_loses(
    backend: LossBackend, case: str
) -> None:
    """Rounded inputs, exact products and float32 sums, so values hold as in float32.

    The gradient of the logits is rounded to bfloat16 (by up to 2^-9 of itself) before it is
    multiplied, and so is that of the hidden states.
    """
    inputs = Inputs(case)
    inputs.hidden = inputs.hidden.astype(jnp.bfloat16)
    inputs.head = inputs.head.astype(jnp.bfloat16).astype(jnp.float32)
    gradients = stats_and_gradients(backend, inputs, 1.0)[1]
    assert [g.dtype for g in gradients] == [jnp.bfloat16, jnp.float32]
    check(backend, inputs, 1.0, bounds=(1e-5, 2**-7))


@pytest.mark.grid
@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
def test_the_head_s_gradient_has_its_dtype_and_is_summed_in_float32(backend: LossBackend) -> None:
    """Many equal small contributions: a bfloat16 sum of them would stop growing early."""
    tokens, rows = 4096, 7
    hidden = jnp.ones((1, 1, tokens, 8), jnp.bfloat16)
    ids = jnp.zeros((1, 1, tokens), jnp.int32)
    for dtype in (jnp.float32, jnp.bfloat16):
        head = jnp.zeros((rows, 8), dtype)
        gradient = jax.jit(jax.grad(lambda w: backend(hidden, w, ids, 1.0).logps.sum()))(head)
        assert gradient.dtype == dtype
        np.testing.assert_allclose(gradient[1:].astype(jnp.float32), -tokens / rows, rtol=8e-3)


@pytest.mark.slow
@settings(max_examples=15)
@given(
    seed=st.integers(0, 10**6),
    token_tile=st.integers(1, 100),
    vocabulary_tile=st.integers(1, 60),
    temperature=st.floats(0.2, 3.0),
)
def test_tiles_of_any_size_change_nothing(
    seed: int, token_tile: int, vocabulary_tile: int, temperature: float
) -> None:
    backend = ChunkedLoss(token_tile, vocabulary_tile)
    check(backend, Inputs("random", seed), temperature)


def test_a_tile_has_at_least_one_token_and_one_row() -> None:
    with pytest.raises(UserError, match="token_tile is 0: it must be a whole number, at least 1"):
        ChunkedLoss(token_tile=0)
    with pytest.raises(UserError, match="vocabulary_tile"):
        ChunkedLoss(vocabulary_tile=0)


@pytest.mark.parametrize("kernels", ["tpu", "gpu"])
def test_kernels_go_over_blocks_of_every_axis(kernels: str) -> None:
    """Two or three blocks of tokens, vocabulary and hidden size in each tile, none filled."""
    tokens, vocabulary, hidden_size = 333, 700, 300
    size = 128 if kernels == "tpu" else 64
    backend = PallasLoss(
        kernels=kernels, token_block=size, vocabulary_block=size, hidden_block=size
    )
    inputs = Inputs("random", 0, vocabulary, (tokens,), hidden_size)
    check(backend, inputs, 0.7)


@pytest.mark.grid
@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
def test_what_an_ignored_token_s_hidden_state_is_does_not_matter(backend: LossBackend) -> None:
    inputs = Inputs("ignored")
    ignored = ((inputs.ids < 0) | (inputs.ids >= VOCAB))[..., None]
    expected = stats_and_gradients(backend, inputs, 1.0)
    for value in (jnp.nan, jnp.inf):
        inputs.hidden = jnp.where(ignored, value, inputs.hidden)
        jax.tree.map(
            np.testing.assert_array_equal, stats_and_gradients(backend, inputs, 1.0), expected
        )


@pytest.mark.parametrize("backend", [DenseLoss(), ChunkedLoss(), PallasLoss()], ids=repr)
def test_no_tokens_give_no_statistics_and_no_gradient(backend: LossBackend) -> None:
    hidden, ids = jnp.zeros((2, 0, 8)), jnp.zeros((2, 0), jnp.int32)
    stats, pull = jax.vjp(lambda w: backend(hidden, w, ids, 1.0), jnp.ones((5, 8)))
    assert stats.logps.shape == (2, 0)
    assert (pull(stats)[0] == 0).all()


@pytest.mark.parametrize(
    ("total", "most", "count"), [(2048, 2048, 1), (2049, 2048, 2), (151_936, 4096, 38), (9, 4, 3)]
)
def test_tiles_are_few_and_about_even(total: int, most: int, count: int) -> None:
    size = tile_size(total, most)
    assert size <= most
    assert (count - 1) * size < total <= count * size
    assert size <= total / count + STRIP


@pytest.mark.parametrize("backend", [DenseLoss(), ChunkedLoss(), PallasLoss()], ids=repr)
def test_what_cannot_be_right_is_refused(backend: LossBackend) -> None:
    hidden, head, ids = jnp.zeros((2, 5, 8)), jnp.zeros((7, 8)), jnp.zeros((2, 5), jnp.int32)
    for temperature in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(UserError, match=r"temperature is .*: it must be a positive number"):
            backend(hidden, head, ids, temperature)
    with pytest.raises(UserError, match=r"softcap is 0\.0: it must be a positive number"):
        backend(hidden, head, ids, 1.0, softcap=0.0)


def h100() -> jax.sharding.AbstractMesh:
    """One, by description; JAX asks for it from 0.12 on, with one field more."""
    fields = {"device_kind": "NVIDIA H100 80GB HBM3", "num_cores": 132, "platform": "gpu"}
    known = {field.name for field in dataclasses.fields(jax.sharding.AbstractDevice)}
    device = jax.sharding.AbstractDevice(**{k: v for k, v in fields.items() if k in known})
    return jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)


@pytest.mark.grid
@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("hidden_size", [896, 1536, 2048, 3584, 5120, 8192])
def test_kernels_for_gpus_pass_triton_s_rules(
    hidden_size: int, dtype: jnp.dtype, softcap: float | None
) -> None:
    """They lower for a GPU, on a machine without one; what its compiler says is not known here."""
    kernels = TritonKernels(BlockSizes(None, None, None), "H100", False)
    tiles = KernelTiles(4096, 4096, kernels, softcap)
    n, v = 1000, 4096

    def run(hidden: Array, head: Array, ids: Array, gradient: ScoreGradient) -> tuple:
        return (
            tiles.sums(hidden, head, ids, jnp.int32(3), 0.7),
            tiles.score_gradient(hidden, head, ids, gradient, 0.7),
        )

    per_token = jax.ShapeDtypeStruct((n,), jnp.float32)
    arguments = (
        jax.ShapeDtypeStruct((n, hidden_size), dtype),
        jax.ShapeDtypeStruct((v, hidden_size), dtype),
        jax.ShapeDtypeStruct((n,), jnp.int32),
        ScoreGradient(*[per_token] * 5),
    )
    with jax.sharding.use_abstract_mesh(h100()):
        lowered = jax.jit(run).trace(*arguments).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("__gpu$xla.gpu.triton") == 2
