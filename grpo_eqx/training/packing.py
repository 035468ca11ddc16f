"""Packing of a prompt's completions into shared rows, so that little of an update is padding."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Shaped

from grpo_eqx.models.base import Rows

MOST_SHARE = 0.75
"""Fraction of the unpacked rows; where more remain, packing does not pay."""


class Packing(eqx.Module):
    """Assignment of the tokens of a batch's completions to rows of `T` positions.

    The batch is divided into `B` bundles, and the completions of a bundle into blocks, each with
    its own rows, so that micro-batches and devices can take whole ones: a bundle is several prompts
    with their groups in one block, or one prompt with its group in several. A row holds completions
    of one prompt only.
    """

    source: Int[Array | np.ndarray, "B R T"]
    """Token of the block at each position, as `completion * Tc + token`; -1 where empty."""
    prompt: Int[Array | np.ndarray, "B R"]
    """Prompt of the bundle that each row belongs to."""
    start: Int[Array | np.ndarray, "P G"]
    """Start of each completion in the rows of its block, as `row * T + column`."""
    group: int = eqx.field(static=True)
    """Completions of each prompt in a block."""

    @classmethod
    def plan(
        cls, lengths: Int[np.ndarray, "P G"], width: int, num_blocks: int, num_bundles: int
    ) -> "Packing | None":
        """Plans rows of `width` for the completions; returns `None` where that saves little.

        **Arguments:** the completions' lengths; the width `Tc` that they are padded to; the number
        of blocks per group; the number of bundles, one per prompt if there are several blocks.
        Few shapes occur: a block has 1 to 8, 10, 12, 14, 16, 20, ... rows.
        """
        P, G = lengths.shape
        group, prompts = G // num_blocks, P // num_bundles
        blocks = lengths.reshape(num_bundles * num_blocks, prompts, group)
        filled = [[_fill(completions, width) for completions in block] for block in blocks]
        rows = _round_up(max(sum(used for used, _ in block) for block in filled))
        if rows > MOST_SHARE * prompts * group:
            return None
        source = np.full((len(blocks), rows * width), -1, np.int32)
        prompt = np.zeros((len(blocks), rows), np.int32)
        start = np.zeros(blocks.shape, np.int32)
        for b, block in enumerate(filled):
            first_row = 0
            for p, (used, starts) in enumerate(block):
                prompt[b, first_row : first_row + used] = p
                start[b, p] = starts + first_row * width
                for g, n in enumerate(blocks[b, p]):
                    tokens = (p * group + g) * width + np.arange(n)
                    source[b, start[b, p, g] : start[b, p, g] + n] = tokens
                first_row += used
        return cls(
            source.reshape(num_bundles, num_blocks * rows, width),
            prompt.reshape(num_bundles, num_blocks * rows),
            start.reshape(P, G),
            group,
        )

    def pack(self, x: Shaped[Array, "P G Tc"], fill: int) -> Shaped[Array, "B R T"]:
        """Gathers tokens' values into the rows, with `fill` at empty positions."""
        source, values = jnp.asarray(self._by_block(self.source)), self._by_block(x)
        packed = jnp.take_along_axis(values, jnp.maximum(source, 0), axis=2)
        return jnp.where(source < 0, fill, packed).reshape(self.source.shape)

    def unpack(self, x: Shaped[Array, "B R T"], width: int) -> Shaped[Array, "P G Tc"]:
        """Gathers rows' values as `[P, G, Tc]`; past a completion's end they are meaningless."""
        P, G = self.start.shape
        positions = jnp.asarray(self.start)[..., None] + jnp.arange(width)
        values = self._by_block(x)
        positions = jnp.minimum(self._by_block(positions), values.shape[2] - 1)
        return jnp.take_along_axis(values, positions, axis=2).reshape(P, G, width)

    def rows(self, width: int) -> Rows:
        """Returns the completion and token at each position, for completions padded to `width`."""
        held = self.source >= 0
        return Rows(
            jnp.where(held, self.source // width, -1), jnp.where(held, self.source % width, 0)
        )

    def _by_block(
        self, x: Shaped[Array | np.ndarray, "_ n m"]
    ) -> Shaped[Array | np.ndarray, "B blocks rest"]:
        return x.reshape(len(self.source), self.start.shape[1] // self.group, -1)


def _fill(lengths: Int[np.ndarray, " g"], size: int) -> tuple[int, Int[np.ndarray, " g"]]:
    """Fills rows first-fit, longest first; returns their number and each completion's start."""
    used: list[int] = []
    start = np.zeros(len(lengths), np.int32)
    for g in np.argsort(-lengths, kind="stable"):
        n = int(lengths[g])
        row = next((r for r, taken in enumerate(used) if taken + n <= size), len(used))
        if row == len(used):
            used.append(0)
        start[g] = row * size + used[row]
        used[row] += n
    return len(used), start


def _round_up(rows: int) -> int:
    """Rounds up to 1 to 8, 10, 12, 14, 16, 20, ...: by a quarter at most."""
    step = 1
    while 8 * step < rows:
        step *= 2
    return -(-rows // step) * step
