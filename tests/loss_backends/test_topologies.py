"""Compiled for described TPUs: kernels pass Mosaic, and programs hold no logits."""

import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from grpo_eqx import grpo_loss
from grpo_eqx.common.errors import UserError
from grpo_eqx.loss_backends import ChunkedLoss, LossBackend, PallasLoss, TokenStats
from grpo_eqx.loss_backends.softmax import ScoreGradient
from grpo_eqx.planner.devices import described_devices
from grpo_eqx.sharding import parse_mesh
from grpo_eqx.sharding.rules import batch_sharding, parameter_sharding

pytest.importorskip("libtpu", reason="needs the plan extra")
pytestmark = pytest.mark.topology

MiB = 2**20
TOKENS = 4096
# Qwen2.5's heads: vocabulary, hidden size. 14B and 32B have the same.
HEADS = {
    "0.5B": (151_936, 896),
    "1.5B": (151_936, 1536),
    "3B": (151_936, 2048),
    "7B": (152_064, 3584),
    "14B": (152_064, 5120),
    "72B": (152_064, 8192),
}


def mesh_of(tpu: str, shape: str = "1,1,1") -> jax.sharding.Mesh:
    size = math.prod(int(axis) for axis in shape.split(","))
    return parse_mesh(shape).build(described_devices(tpu)[:size])


def compiled(
    backend: LossBackend,
    mesh: jax.sharding.Mesh,
    vocabulary: int,
    hidden_size: int,
    *,
    prompts: int = 1,
) -> jax.stages.Compiled:
    """Values and both gradients for bfloat16 hidden states and a float32 head."""
    tokens = batch_sharding(mesh, prompts, 1)
    head = parameter_sharding(mesh, ("vocab", "hidden"), (vocabulary, hidden_size))

    def run(
        hidden: Array, head: Array, ids: Array, g: TokenStats, temperature: Array
    ) -> tuple[TokenStats, Array]:
        stats, pull = jax.vjp(lambda h, w: backend(h, w, ids, temperature, mesh), hidden, head)
        return stats, pull(g)

    def array(shape: tuple[int, ...], dtype: jnp.dtype, sharding: NamedSharding) -> Array:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    per_token = array((prompts, 1, TOKENS), jnp.float32, tokens)
    return (
        jax.jit(run, out_shardings=(tokens, (tokens, head)))
        .lower(
            array((prompts, 1, TOKENS, hidden_size), jnp.bfloat16, tokens),
            array((vocabulary, hidden_size), jnp.float32, head),
            array((prompts, 1, TOKENS), jnp.int32, tokens),
            TokenStats(per_token, per_token, per_token),
            array((), jnp.float32, NamedSharding(mesh, PartitionSpec())),
        )
        .compile()
    )


def largest_array_but(program: jax.stages.Compiled, *shapes: tuple[int, ...]) -> int:
    """Elements of the largest array in a compiled program's text that has none of these shapes."""
    found = {
        tuple(int(size) for size in dims.split(","))
        for dims in re.findall(r"\w+\[([\d,]+)\]", program.as_text())
    }
    return max(math.prod(shape) for shape in found - set(shapes))


def compile_kernels(
    backend: PallasLoss,
    tpu: str,
    vocabulary: int,
    hidden_size: int,
    softcap: float | None = None,
) -> None:
    """Compiles both kernels for a tile, without what XLA does around them."""
    device = described_devices(tpu)[0]
    here = NamedSharding(mesh_of(tpu), PartitionSpec())
    tokens, rows = backend.token_tile, min(backend.vocabulary_tile, vocabulary)
    tiles = backend.tiles(device, hidden_size, jnp.dtype(jnp.bfloat16), softcap)
    per_token = jax.ShapeDtypeStruct((tokens,), jnp.float32, sharding=here)

    def run(hidden: Array, head: Array, ids: Array, gradient: ScoreGradient) -> tuple:
        return (
            tiles.sums(hidden, head, ids, jnp.int32(3), 0.7),
            tiles.score_gradient(hidden, head, ids, gradient, 0.7),
        )

    text = (
        jax.jit(run)
        .lower(
            jax.ShapeDtypeStruct((tokens, hidden_size), jnp.bfloat16, sharding=here),
            jax.ShapeDtypeStruct((rows, hidden_size), jnp.bfloat16, sharding=here),
            jax.ShapeDtypeStruct((tokens,), jnp.int32, sharding=here),
            ScoreGradient(*[per_token] * 5),
        )
        .compile()
        .as_text()
    )
    assert text.count('custom_call_target="tpu_custom_call"') == 2


@pytest.mark.grid
@pytest.mark.parametrize(
    ("tpu", "model"),
    [
        *[(tpu, "3B") for tpu in ("v4-16", "v6e-8")],
        ("v6e-8", "7B"),
        *[pytest.param(tpu, "3B", marks=pytest.mark.long) for tpu in ("v5e-8", "v5p-16")],
        *[
            pytest.param("v6e-8", model, marks=pytest.mark.long)
            for model in HEADS
            if model not in ("3B", "7B")
        ],
    ],
)
def test_kernels_compile_for_every_head(model: str, tpu: str) -> None:
    compile_kernels(PallasLoss(), tpu, *HEADS[model])


@pytest.mark.grid
@pytest.mark.parametrize("tpu", ["v4-16", "v6e-8"])
def test_kernels_compile_with_a_soft_cap(tpu: str) -> None:
    """In the vector memory that they need without: for Gemma 2's head of 2B."""
    compile_kernels(PallasLoss(), tpu, 256_000, 2304, softcap=30.0)


@pytest.mark.grid
@pytest.mark.parametrize(
    ("tpu", "blocks"),
    [
        ("v4-16", (128, 128, 128)),
        pytest.param("v4-16", (512, 512, 1024), marks=pytest.mark.long),
        pytest.param("v4-16", (128, 2048, 512), marks=pytest.mark.long),
        ("v4-16", (1024, 384, 256)),
        pytest.param("v6e-8", (128, 4096, 2048), marks=pytest.mark.long),
        ("v6e-8", (2048, 2048, 512)),
        ("v6e-8", (384, 640, 896)),
    ],
)
def test_block_sizes_that_are_accepted_compile(tpu: str, blocks: tuple[int, int, int]) -> None:
    tokens, vocabulary, hidden = blocks
    backend = PallasLoss(token_block=tokens, vocabulary_block=vocabulary, hidden_block=hidden)
    compile_kernels(backend, tpu, 151_936, 2048)


def test_others_are_refused_with_the_valid_ones() -> None:
    mesh = mesh_of("v4-16")
    for backend, message in [
        (PallasLoss(token_block=100), "token_block is 100: on a TPU it must be a multiple of 128"),
        (PallasLoss(vocabulary_block=2048, token_block=2048), "MiB of vector memory, but TPU v4"),
        (PallasLoss(kernels="gpu"), "cannot run on TPU v4: leave it None"),
    ]:
        with pytest.raises(UserError, match=message):
            compiled(backend, mesh, 151_936, 896)


@pytest.mark.grid
@pytest.mark.parametrize("backend", [ChunkedLoss(), PallasLoss()], ids=repr)
@pytest.mark.parametrize(
    ("vocabulary", "hidden_size"),
    [(151_643, 896), pytest.param(151_936, 3584, marks=pytest.mark.long)],
)
def test_programs_hold_no_logits_and_little_else(
    vocabulary: int, hidden_size: int, backend: LossBackend
) -> None:
    program = compiled(backend, mesh_of("v6e-8"), vocabulary, hidden_size)
    assert largest_array_but(program, (vocabulary, hidden_size)) < TOKENS * vocabulary / 10
    assert program.memory_analysis().temp_size_in_bytes < 256 * MiB


@pytest.mark.parametrize("backend", [ChunkedLoss(), PallasLoss()], ids=repr)
def test_on_a_mesh_each_device_holds_its_part_of_the_head_alone(backend: LossBackend) -> None:
    vocabulary, hidden_size = HEADS["3B"]
    program = compiled(backend, mesh_of("v6e-8", "1,4,2"), vocabulary, hidden_size, prompts=4)
    part = vocabulary // 2, hidden_size // 4
    assert largest_array_but(program, part) < TOKENS * vocabulary / 10
    assert program.memory_analysis().temp_size_in_bytes < 256 * MiB


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_loss_on_logits_holds_nothing_else_of_their_size(dtype: jnp.dtype) -> None:
    shape = (1, TOKENS, 151_643)
    here = NamedSharding(mesh_of("v6e-8"), PartitionSpec())

    def loss(logits: Array, ids: Array, advantages: Array, old_logps: Array) -> Array:
        return grpo_loss(logits, ids, advantages, old_logps=old_logps)[0]

    def array(shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=here)

    memory = (
        jax.jit(jax.value_and_grad(loss))
        .lower(
            array(shape, dtype),
            array(shape[:2], jnp.int32),
            array(shape[:1], jnp.float32),
            array(shape[:2], jnp.float32),
        )
        .compile()
        .memory_analysis()
    )
    assert memory.output_size_in_bytes < 1.001 * math.prod(shape) * jnp.dtype(dtype).itemsize
    assert memory.temp_size_in_bytes < MiB
