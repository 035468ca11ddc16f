"""Kernels for GPUs, compiled by Triton."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
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

# KiB of shared memory for a program's inputs. Other kinds of GPU are assumed to have the least.
SHARED_MEMORY = {"H100": 227, "H200": 227, "B200": 227, "A100": 163}
LEAST_SHARED_MEMORY = 99
VALID_SIZES = (16, 32, 64, 128, 256)
MOST_SCORES = 128 * 256
"""Maximum scores per block: its registers hold no more."""


@dataclasses.dataclass(frozen=True)
class TritonKernels(Kernels):
    """Kernels with one program per block of tokens x vocabulary, looping over the hidden dim."""

    sizes: BlockSizes
    device_kind: str
    interpret: bool

    def blocks(self, problem: Problem) -> Blocks:
        kib = _shared_memory(self.device_kind)
        blocks = self.sizes.over(_default_blocks(problem, kib))
        for name, size in zip(self.sizes._fields, blocks, strict=True):
            if size not in VALID_SIZES:
                valid = ", ".join(map(str, VALID_SIZES))
                raise UserError(f"{name} is {size}: on a GPU it must be one of {valid}.")
        if blocks.tokens * blocks.vocabulary > MOST_SCORES:
            raise UserError(
                f"token_block={blocks.tokens} x vocabulary_block={blocks.vocabulary} is too much "
                f"for a GPU's registers: make the product at most {MOST_SCORES} (128 x 256)."
            )
        if _num_stages(blocks, kib, problem.dtype) < 2:
            needed = 2 * _stage(blocks, problem.dtype) // 1024
            raise UserError(
                f"blocks of token_block={blocks.tokens} x vocabulary_block={blocks.vocabulary} x "
                f"hidden_block={blocks.hidden} in {problem.dtype} need {needed} KiB of shared "
                f"memory, but {self.device_kind} has {kib}: use a hidden_block of at most "
                f"{_largest_hidden_block(blocks, kib, problem.dtype)}."
            )
        return blocks

    def run(
        self, problem: Problem, operands: Operands, epilogue: Epilogue, output: Output
    ) -> Array:
        tokens, vocabulary, width = blocks = self.blocks(problem)
        n, hidden_size = operands.hidden.shape
        kib = _shared_memory(self.device_kind)

        def kernel(bounds: Any, hidden: Any, head: Any, *refs: Any) -> None:
            ids, *per_token, out = refs

            def add(step: Array, scores: Array) -> Array:
                columns = pl.ds(step * width, width)
                return scores + product("vh,nh->vn", head[:, columns], hidden[:, columns])

            zeros = jnp.zeros((vocabulary, tokens), jnp.float32)
            scores = jax.lax.fori_loop(0, hidden_size // width, add, zeros)
            first_row = pl.program_id(1) * vocabulary
            limits = bounds[0], bounds[1]
            epilogue(BlockScores.of(scores, first_row, limits, ids[...]), tuple(per_token), out)

        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct(output.shape, output.dtype),
            # Blocks of tokens vary fastest: programs that run concurrently share rows of the head.
            grid=(n // tokens, len(operands.head) // vocabulary),
            in_specs=[
                pl.BlockSpec((2,), lambda i, j: (0,)),
                pl.BlockSpec((tokens, hidden_size), lambda i, j: (i, 0)),
                pl.BlockSpec((vocabulary, hidden_size), lambda i, j: (j, 0)),
                pl.BlockSpec((1, tokens), lambda i, j: (0, i)),
                *(pl.BlockSpec((len(x), tokens), lambda i, j: (0, i)) for x in operands.per_token),
            ],
            out_specs=pl.BlockSpec(output.block, output.block_index),
            compiler_params=plgpu.CompilerParams(
                num_warps=8 if tokens * vocabulary >= 128 * 128 else 4,
                num_stages=_num_stages(blocks, kib, problem.dtype),
            ),
            interpret=self.interpret,
        )(*operands.flat())


def _shared_memory(device_kind: str) -> int:
    """Returns the shared memory of a program, in KiB."""
    known = (kib for name, kib in SHARED_MEMORY.items() if name in device_kind)
    return next(known, LEAST_SHARED_MEMORY)


def _default_blocks(problem: Problem, kib: int) -> Blocks:
    if problem.dtype == jnp.float32:
        return Blocks(64, 64, 32)
    return Blocks(128, 256, 64) if kib > LEAST_SHARED_MEMORY else Blocks(64, 128, 64)


def _stage(blocks: Blocks, dtype: jnp.dtype) -> int:
    """Returns the bytes of inputs of one step over the hidden dim."""
    return (blocks.tokens + blocks.vocabulary) * blocks.hidden * dtype.itemsize


def _num_stages(blocks: Blocks, kib: int, dtype: jnp.dtype) -> int:
    """Returns the number of steps whose inputs are in shared memory at a time."""
    return min(4, kib * 1024 // _stage(blocks, dtype))


def _largest_hidden_block(blocks: Blocks, kib: int, dtype: jnp.dtype) -> int:
    per_column = 2 * (blocks.tokens + blocks.vocabulary) * dtype.itemsize
    return max(size for size in VALID_SIZES if size * per_column <= kib * 1024)
