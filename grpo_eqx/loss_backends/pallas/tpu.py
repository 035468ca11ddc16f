"""Kernels for TPUs, compiled by Mosaic."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from grpo_eqx.common.errors import UserError
from grpo_eqx.loss_backends.pallas.kernels import (
    Blocks,
    BlockScores,
    BlockSizes,
    Epilogue,
    Kernels,
    Operands,
    Output,
    Problem,
)
from grpo_eqx.models.product import product

# Columns of a register, and of a tile of the matrix unit.
LANES = 128
MIB = 2**20
# Vector memory of a core, for a kernel's blocks. Other kinds of TPU are assumed to have the least.
VMEM = {
    "TPU v4": 16 * MIB,
    "TPU v5": 64 * MIB,
    "TPU v5p": 64 * MIB,
    "TPU v5 lite": 128 * MIB,
    "TPU v5e": 128 * MIB,
    "TPU v6 lite": 128 * MIB,
    "TPU v6e": 128 * MIB,
    "TPU7x": 64 * MIB,
}
LEAST_VMEM = 16 * MIB


@dataclasses.dataclass(frozen=True)
class MosaicKernels(Kernels):
    """Kernels with the hidden dim innermost in the grid, to keep blocks small for any head."""

    sizes: BlockSizes
    device_kind: str
    interpret: bool

    def blocks(self, problem: Problem) -> Blocks:
        capacity = VMEM.get(self.device_kind, LEAST_VMEM)
        defaults = _default_blocks(problem, capacity)
        blocks = self.sizes.over(defaults)
        for name, size in zip(self.sizes._fields, blocks, strict=True):
            if size < 1 or size % LANES:
                raise UserError(f"{name} is {size}: on a TPU it must be a multiple of {LANES}.")
        needed = _vmem(blocks, problem.dtype)
        if needed > capacity:
            raise UserError(
                f"blocks of token_block={blocks.tokens} x vocabulary_block={blocks.vocabulary} x "
                f"hidden_block={blocks.hidden} in {problem.dtype} need about "
                f"{needed / MIB:.0f} MiB of vector memory, but {self.device_kind} has "
                f"{capacity // MIB}: use multiples of {LANES} up to about {defaults.tokens}, "
                f"{defaults.vocabulary} and {defaults.hidden}."
            )
        return blocks

    def run(
        self, problem: Problem, operands: Operands, epilogue: Epilogue, output: Output
    ) -> Array:
        tokens, vocabulary, width = blocks = self.blocks(problem)
        n, hidden_size = operands.hidden.shape

        def kernel(bounds: Any, hidden: Any, head: Any, *refs: Any) -> None:
            ids, *per_token, out, scores = refs
            first_row, step = pl.program_id(1) * vocabulary, pl.program_id(2)

            @pl.when(step == 0)
            def _() -> None:
                scores[...] = jnp.zeros_like(scores)

            scores[...] += product("vh,nh->vn", head[...], hidden[...])

            @pl.when(step == pl.num_programs(2) - 1)
            def _() -> None:
                limits = bounds[0], bounds[1]
                block = BlockScores.of(scores[...], first_row, limits, ids[...])
                epilogue(block, tuple(per_token), out)

        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct(output.shape, output.dtype),
            grid=(n // tokens, len(operands.head) // vocabulary, hidden_size // width),
            in_specs=[
                pl.BlockSpec(memory_space=pltpu.SMEM),
                pl.BlockSpec((tokens, width), lambda i, j, k: (i, k)),
                pl.BlockSpec((vocabulary, width), lambda i, j, k: (j, k)),
                pl.BlockSpec((1, tokens), lambda i, j, k: (0, i)),
                *(
                    pl.BlockSpec((len(x), tokens), lambda i, j, k: (0, i))
                    for x in operands.per_token
                ),
            ],
            out_specs=pl.BlockSpec(output.block, lambda i, j, k: output.block_index(i, j)),
            scratch_shapes=[pltpu.VMEM((vocabulary, tokens), jnp.float32)],
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", "arbitrary"),
                vmem_limit_bytes=_vmem(blocks, problem.dtype),
            ),
            interpret=self.interpret,
        )(*operands.flat())


def _default_blocks(problem: Problem, capacity: int) -> Blocks:
    """Returns blocks large enough to keep the matrix unit busy while the next ones are loaded.

    A block does tokens * vocabulary / (tokens + vocabulary) multiplications per element loaded:
    683 where memory allows. TPU v6e, which needs the most, computes 560 in the time that it loads
    one bfloat16.
    """
    exact = problem.dtype == jnp.float32
    if capacity >= 128 * MIB:
        tokens, vocabulary = (512, 512) if exact else (1024, 2048)
    elif capacity >= 64 * MIB:
        tokens, vocabulary = (512, 512) if exact else (1024, 1024)
    else:
        tokens, vocabulary = (256, 256) if exact else (512, 512)
    strips = -(-problem.hidden // LANES)
    width = max(n for n in range(1, 9) if strips % n == 0)
    return Blocks(
        min(tokens, _whole_lanes(problem.tokens)),
        min(vocabulary, _whole_lanes(problem.vocabulary)),
        width * LANES,
    )


def _whole_lanes(size: int) -> int:
    return -(-size // LANES) * LANES


def _vmem(blocks: Blocks, dtype: jnp.dtype) -> int:
    """Returns an upper bound on a kernel's bytes, found by compiling many sizes.

    There are two buffers for the inputs, split into bfloat16 parts if these are float32, and six
    arrays of a block's scores.
    """
    inputs = 2 * (blocks.tokens + blocks.vocabulary) * blocks.hidden * dtype.itemsize
    scores = blocks.tokens * blocks.vocabulary * 4
    return inputs * (3 if dtype == jnp.float32 else 1) + 6 * scores + MIB
