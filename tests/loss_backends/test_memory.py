"""The programs compiled for CPUs at the size of real heads: no logits, few temporaries."""

import math
import re

import jax
import jax.numpy as jnp
import pytest
from jaxtyping import Array

from grpo_eqx.loss_backends import ChunkedLoss, DenseLoss, LossBackend, TokenStats

TOKENS = 4096
HEADS = {"0.5B": 896, "3B": 2048, "7B": 3584}
MiB = 2**20


def compiled(
    backend: LossBackend, vocabulary: int, hidden_size: int, head_dtype: jnp.dtype
) -> jax.stages.Compiled:
    """Values and both gradients, for arbitrary cotangents; compiled, never run."""

    def run(hidden: Array, head: Array, ids: Array, g: TokenStats) -> tuple[TokenStats, Array]:
        stats, pull = jax.vjp(lambda h, w: backend(h, w, ids, 1.0), hidden, head)
        return stats, pull(g)

    per_token = jax.ShapeDtypeStruct((1, 1, TOKENS), jnp.float32)
    arguments = (
        jax.ShapeDtypeStruct((1, 1, TOKENS, hidden_size), jnp.bfloat16),
        jax.ShapeDtypeStruct((vocabulary, hidden_size), head_dtype),
        jax.ShapeDtypeStruct((1, 1, TOKENS), jnp.int32),
        TokenStats(per_token, per_token, per_token),
    )
    return jax.jit(run).lower(*arguments).compile()


def arrays(program: jax.stages.Compiled) -> set[tuple[int, ...]]:
    """The shapes of all arrays in a compiled program's text."""
    found = re.findall(r"\w+\[([\d,]+)\]", program.as_text())
    return {tuple(int(size) for size in dims.split(",")) for dims in found}


@pytest.mark.parametrize("head_dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("vocabulary", [151_643, 151_936])
@pytest.mark.parametrize("hidden_size", HEADS.values(), ids=HEADS)
def test_chunked_holds_no_logits_and_little_else(
    hidden_size: int, vocabulary: int, head_dtype: jnp.dtype
) -> None:
    program = compiled(ChunkedLoss(), vocabulary, hidden_size, head_dtype)
    shapes = arrays(program)
    head = (vocabulary, hidden_size)
    assert head in shapes
    assert max(math.prod(shape) for shape in shapes - {head}) <= TOKENS * max(HEADS.values())
    # Neither the head's gradient, which is an output, nor a copy of it or of the head.
    assert program.memory_analysis().temp_size_in_bytes < 256 * MiB


def test_a_program_holds_a_few_tiles() -> None:
    program = compiled(ChunkedLoss(512, 512), 4096, 64, jnp.float32)
    assert program.memory_analysis().temp_size_in_bytes < 12 * 4 * 512 * 512


def test_the_text_would_show_logits() -> None:
    shapes = arrays(compiled(DenseLoss(), 151_936, 896, jnp.float32))
    assert TOKENS * 151_936 in {math.prod(shape) for shape in shapes}
