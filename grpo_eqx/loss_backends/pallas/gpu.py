"""Kernels for GPUs, compiled by Triton."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array

from grpo_eqx.errors import UserError
from grpo_eqx.loss_backends.pallas.kernels import (
    Blocks,
    BlockScores,
    BlockSizes,
    Epilogue,
    KernelTiles,
    Operands,
    Output,
    Problem,
)
from grpo_eqx.loss_backends.softmax import product

# KiB of shared memory of a program, where its inputs arrive. Of other kinds, the least.
SHARED_MEMORY = {"H100": 227, "H200": 227, "B200": 227, "A100": 163}
LEAST_SHARED_MEMORY = 99
VALID_SIZES = (16, 32, 64, 128, 256)
MOST_SCORES = 128 * 256
"""Of a block: its registers hold no more."""


def triton_tiles(
    problem: Problem, sizes: BlockSizes, device_kind: str, *, interpret: bool
) -> "TritonTiles":
    """The kernels for a device; raises `UserError` for block sizes that it cannot run."""
    known = (kib for name, kib in SHARED_MEMORY.items() if name in device_kind)
    kib = next(known, LEAST_SHARED_MEMORY)
    blocks = sizes.over(_default_blocks(problem, kib))
    for name, size in zip(sizes._fields, blocks, strict=True):
        if size not in VALID_SIZES:
            valid = ", ".join(map(str, VALID_SIZES))
            raise UserError(f"{name} is {size}: on a GPU it must be one of {valid}.")
    if blocks.tokens * blocks.vocabulary > MOST_SCORES:
        raise UserError(
            f"token_block={blocks.tokens} x vocabulary_block={blocks.vocabulary} is too much for "
            f"a GPU's registers: make the product at most {MOST_SCORES}, as of 128 x 256."
        )
    stage = (blocks.tokens + blocks.vocabulary) * blocks.hidden * problem.dtype.itemsize
    num_stages = min(4, kib * 1024 // stage)
    if num_stages < 2:
        raise UserError(
            f"blocks of token_block={blocks.tokens} x vocabulary_block={blocks.vocabulary} x "
            f"hidden_block={blocks.hidden} in {problem.dtype} need {2 * stage // 1024} KiB of "
            f"shared memory, and {device_kind} has {kib}: use a hidden_block of at most "
            f"{_largest_hidden_block(blocks, kib, problem.dtype)}."
        )
    return TritonTiles(
        problem.tokens,
        problem.vocabulary,
        blocks,
        interpret=interpret,
        num_warps=8 if blocks.tokens * blocks.vocabulary >= 128 * 128 else 4,
        num_stages=num_stages,
    )


def _default_blocks(problem: Problem, kib: int) -> Blocks:
    if problem.dtype == jnp.float32:
        return Blocks(64, 64, 32)
    return Blocks(128, 256, 64) if kib > LEAST_SHARED_MEMORY else Blocks(64, 128, 64)


def _largest_hidden_block(blocks: Blocks, kib: int, dtype: jnp.dtype) -> int:
    per_column = 2 * (blocks.tokens + blocks.vocabulary) * dtype.itemsize
    return max(size for size in VALID_SIZES if size * per_column <= kib * 1024)


@dataclasses.dataclass(frozen=True)
class TritonTiles(KernelTiles):
    """A program computes one block of tokens x vocabulary, and loops over the hidden dimension."""

    num_warps: int
    num_stages: int

    def run(self, operands: Operands, epilogue: Epilogue, output: Output) -> Array:
        tokens, vocabulary, width = self.blocks
        n, hidden_size = operands.hidden.shape

        def kernel(bounds: Any, hidden: Any, head: Any, *refs: Any) -> None:
            ids, per_token, out = refs

            def add(step: Array, scores: Array) -> Array:
                columns = pl.ds(step * width, width)
                return scores + product("vh,nh->vn", head[:, columns], hidden[:, columns])

            zeros = jnp.zeros((vocabulary, tokens), jnp.float32)
            scores = jax.lax.fori_loop(0, hidden_size // width, add, zeros)
            first_row = pl.program_id(1) * vocabulary
            limits = bounds[0], bounds[1]
            epilogue(BlockScores.of(scores, first_row, limits, ids[...]), per_token, out)

        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct(output.shape, output.dtype),
            # Blocks of tokens change fastest: those that run at a time share rows of the head.
            grid=(n // tokens, len(operands.head) // vocabulary),
            in_specs=[
                pl.BlockSpec((2,), lambda i, j: (0,)),
                pl.BlockSpec((tokens, hidden_size), lambda i, j: (i, 0)),
                pl.BlockSpec((vocabulary, hidden_size), lambda i, j: (j, 0)),
                pl.BlockSpec((1, tokens), lambda i, j: (0, i)),
                pl.BlockSpec((len(operands.per_token), tokens), lambda i, j: (0, i)),
            ],
            out_specs=pl.BlockSpec(output.block, output.place),
            compiler_params=plgpu.CompilerParams(
                num_warps=self.num_warps, num_stages=self.num_stages
            ),
            interpret=self.interpret,
        )(*operands)
