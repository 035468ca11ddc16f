"""Parts that the kernels of all platforms share: blocks, and the epilogues on a block's scores.

A kernel iterates over blocks of tokens x vocabulary, each a matrix product with an epilogue: sums
over the block's rows, or the gradient of its scores. Blocks are independent of each other; XLA
merges the sums, and multiplies the gradient by the hidden states and the head at its own full rate.
"""

import abc
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from grpo_eqx.common.shapes import Number
from grpo_eqx.loss_backends.softmax import Partial, ScoreGradient
from grpo_eqx.loss_backends.tiles import Tiles
from grpo_eqx.models.softcap import gradient_before_cap, soft_capped

NUM_SUMS, NUM_GRADIENT_FIELDS = len(Partial._fields), len(ScoreGradient._fields)


class Blocks(NamedTuple):
    """Sizes of a kernel's blocks."""

    tokens: int
    vocabulary: int
    hidden: int


class BlockSizes(NamedTuple):
    """`Blocks` as given by the user. `None`: chosen automatically."""

    token_block: int | None
    vocabulary_block: int | None
    hidden_block: int | None

    def over(self, defaults: Blocks) -> Blocks:
        """Returns the given sizes, and the defaults where none is given."""
        return Blocks(
            *(
                default if size is None else size
                for size, default in zip(self, defaults, strict=True)
            )
        )


class Problem(NamedTuple):
    """Inputs to the choice of block sizes: a tile's shape, and the dtype of its products."""

    tokens: int
    vocabulary: int
    hidden: int
    dtype: jnp.dtype


class BlockScores(NamedTuple):
    """A block's scores, with masks of the tokens' own scores and of valid rows."""

    scores: Float[Array, "v n"]
    own: Bool[Array, "v n"]
    """True at each token's own score."""
    valid: Bool[Array, "v n"]
    """True where the row counts."""

    @classmethod
    def of(
        cls,
        scores: Float[Array, "v n"],
        first_row: Int[Array, ""],
        bounds: tuple[Int[Array, ""], Int[Array, ""]],
        ids: Int[Array, "1 n"],
    ) -> "BlockScores":
        """Builds the block that begins at `first_row` of the tile; `bounds` as in `Operands`."""
        rows = first_row + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 0)
        return cls(scores, rows == ids, (rows >= bounds[0]) & (rows < bounds[1]))


class Operands(NamedTuple):
    """A kernel's arrays, zero-padded to whole blocks."""

    bounds: Int[Array, " 2"]
    """First row of the head that counts, and the first one past those that do."""
    hidden: Float[Array, "n H"]
    head: Float[Array, "v H"]
    ids: Int[Array, "1 n"]
    per_token: tuple[Float[Array, "k n"], ...] = ()
    """Further per-token inputs of the epilogue."""

    def flat(self) -> tuple[Array, ...]:
        """Returns the arrays in the order of the kernels' arguments."""
        return (*self[:4], *self.per_token)


# Takes a block's scores, refs of its tokens' `per_token`, and the ref of the output to write.
Epilogue = Callable[[BlockScores, tuple[Any, ...], Any], None]


class Output(NamedTuple):
    """A kernel's output; each block of tokens x vocabulary writes one block of it."""

    shape: tuple[int, ...]
    dtype: jnp.dtype
    block: tuple[int | None, ...]
    block_index: Callable[[int, int], tuple[int, ...]]
    """Index of the output block, given those of the token and vocabulary blocks."""


class Kernels(abc.ABC):
    """Kernels of one kind of device: the blocks it can run, and how it runs them; hashable."""

    @abc.abstractmethod
    def blocks(self, problem: Problem) -> Blocks:
        """Returns a tile's blocks; raises `UserError` for sizes that the device cannot run."""

    @abc.abstractmethod
    def run(
        self, problem: Problem, operands: Operands, epilogue: Epilogue, output: Output
    ) -> Array:
        """Runs a kernel on a tile: computes every block's scores and applies `epilogue` to them."""


@dataclasses.dataclass(frozen=True)
class KernelTiles(Tiles):
    """Tiles that a kernel computes in blocks."""

    tokens: int
    vocabulary: int
    kernels: Kernels
    softcap: float | None = None

    def sums(
        self,
        hidden: Float[Array, "n H"],
        head: Float[Array, "v H"],
        ids: Int[Array, " n"],
        first: Int[Array, ""],
        temperature: Number,
    ) -> Partial:
        problem, blocks = self._problem(hidden, head)
        operands = _operands(blocks, hidden, head, ids, first, temperature)
        n, v = operands.ids.shape[1], len(operands.head)
        # A block's sums are stacked in the order of `Partial`.
        output = Output(
            (v // blocks.vocabulary, NUM_SUMS, n),
            jnp.dtype(jnp.float32),
            (None, NUM_SUMS, blocks.tokens),
            lambda i, j: (j, 0, i),
        )
        epilogue = partial(_write_sums, softcap=self.softcap)
        stacked = self.kernels.run(problem, operands, epilogue, output)
        return Partial(*(stacked[:, i, : len(ids)] for i in range(NUM_SUMS)))

    def score_gradient(
        self,
        hidden: Float[Array, "n H"],
        head: Float[Array, "v H"],
        ids: Int[Array, " n"],
        gradient: ScoreGradient,
        temperature: Number,
    ) -> Float[Array, "v n"]:
        problem, blocks = self._problem(hidden, head)
        operands = _operands(blocks, hidden, head, ids, 0, temperature, jnp.stack(gradient))
        n, v = operands.ids.shape[1], len(operands.head)
        output = Output(
            (v, n),
            hidden.dtype,
            (blocks.vocabulary, blocks.tokens),
            lambda i, j: (j, i),
        )
        epilogue = partial(_write_gradient, softcap=self.softcap)
        return self.kernels.run(problem, operands, epilogue, output)[: len(head), : len(ids)]

    def _problem(
        self, hidden: Float[Array, "n H"], head: Float[Array, "v H"]
    ) -> tuple[Problem, Blocks]:
        problem = Problem(len(hidden), len(head), hidden.shape[1], hidden.dtype)
        return problem, self.kernels.blocks(problem)


def _operands(
    blocks: Blocks,
    hidden: Float[Array, "n H"],
    head: Float[Array, "v H"],
    ids: Int[Array, " n"],
    first: Int[Array, ""] | int,
    temperature: Number,
    *per_token: Float[Array, "k n"],
) -> Operands:
    ids = _filled(ids[None], (1, blocks.tokens))
    # A kernel cannot read a number from outside, but an array, and has one for the tokens.
    temperatures = jnp.full(ids.shape, temperature, jnp.float32)
    return Operands(
        jnp.stack([jnp.asarray(first, jnp.int32), jnp.int32(len(head))]),
        _filled(hidden, (blocks.tokens, blocks.hidden)),
        _filled(head, (blocks.vocabulary, blocks.hidden)),
        ids,
        (temperatures, *(_filled(x, (1, blocks.tokens)) for x in per_token)),
    )


def _write_sums(
    block: BlockScores,
    per_token: tuple[Any],
    out: Any,
    *,
    softcap: float | None,
) -> None:
    (temperatures,) = per_token
    scores = soft_capped(block.scores, softcap)
    sums = Partial.of_scores(scores, block.own, block.valid, temperatures[...])
    for i, each in enumerate(sums):
        out[i : i + 1, :] = each


def _write_gradient(
    block: BlockScores,
    per_token: tuple[Any, Any],
    out: Any,
    *,
    softcap: float | None,
) -> None:
    temperatures, fields = per_token
    gradient = ScoreGradient(*(fields[i : i + 1, :] for i in range(NUM_GRADIENT_FIELDS)))
    scores = soft_capped(block.scores, softcap)
    by_scores = gradient.at(scores, block.own, temperatures[...])
    out[...] = gradient_before_cap(by_scores, scores, softcap).astype(out.dtype)


def _filled(x: Array, blocks: tuple[int, int]) -> Array:
    """Zero-pads an array to whole blocks."""
    return jnp.pad(x, [(0, -size % block) for size, block in zip(x.shape, blocks, strict=True)])
