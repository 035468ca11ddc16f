"""Several completions of a prompt in one row, so that little of an update is padding."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Shaped

from grpo_eqx.models.qwen2 import Rows

MOST_SHARE = 0.75
"""Of the rows without packing: where more are left, it does not pay."""


class Packing(eqx.Module):
    """Where the tokens of a batch's completions lie in rows of `T = Tc`.

    The `G` completions of a prompt come in blocks of `block`, each with rows of its own, so that
    micro-batches and devices can take whole blocks.
    """

    source: Int[Array | np.ndarray, "P R T"]
    """Which token of its block lies there, as `completion * Tc + token`; -1 where none does."""
    start: Int[Array | np.ndarray, "P G"]
    """Where a completion begins in the rows of its block, as `row * T + column`."""
    block: int = eqx.field(static=True)

    @classmethod
    def plan(cls, lengths: Int[np.ndarray, "P G"], width: int, num_blocks: int) -> "Packing | None":
        """Rows of `width` that hold the completions; `None` where that saves little.

        **Arguments:** the completions' lengths; the width `Tc` that they are padded to; the blocks
        of each prompt. Few shapes occur: a block has 1, 2, 3, 4, 6, 8, 12, 16, ... rows.
        """
        P, G = lengths.shape
        blocks = lengths.reshape(P * num_blocks, G // num_blocks)
        filled = [_fill(block, width) for block in blocks]
        rows = _round_up(max(used for used, _ in filled))
        if rows > MOST_SHARE * blocks.shape[1]:
            return None
        source = np.full((len(blocks), rows * width), -1, np.int32)
        for row, (_, start), block in zip(source, filled, blocks, strict=True):
            for g, (first, n) in enumerate(zip(start, block, strict=True)):
                row[first : first + n] = g * width + np.arange(n)
        start = np.stack([start for _, start in filled])
        return cls(
            source.reshape(P, num_blocks * rows, width), start.reshape(P, G), blocks.shape[1]
        )

    def pack(self, x: Shaped[Array, "P G Tc"], fill: int) -> Shaped[Array, "P R T"]:
        """Values of tokens at their places in the rows, and `fill` elsewhere."""
        source, values = jnp.asarray(self._by_block(self.source)), self._by_block(x)
        packed = jnp.take_along_axis(values, jnp.maximum(source, 0), axis=2)
        return jnp.where(source < 0, fill, packed).reshape(self.source.shape)

    def unpack(self, x: Shaped[Array, "P R T"], width: int) -> Shaped[Array, "P G Tc"]:
        """Values of the rows as `[P, G, Tc]`; past a completion's end they have no meaning."""
        P, G = self.start.shape
        places = jnp.asarray(self.start)[..., None] + jnp.arange(width)
        values = self._by_block(x)
        places = jnp.minimum(self._by_block(places), values.shape[2] - 1)
        return jnp.take_along_axis(values, places, axis=2).reshape(P, G, width)

    def rows(self, width: int) -> Rows:
        """What each place holds, of completions that are padded to `width`."""
        held = self.source >= 0
        return Rows(
            jnp.where(held, self.source // width, -1), jnp.where(held, self.source % width, 0)
        )

    def _by_block(
        self, x: Shaped[Array | np.ndarray, "P n m"]
    ) -> Shaped[Array | np.ndarray, "P blocks rest"]:
        P, G = self.start.shape
        return x.reshape(P, G // self.block, -1)


def _fill(lengths: Int[np.ndarray, " g"], size: int) -> tuple[int, Int[np.ndarray, " g"]]:
    """Longest first, each into the first row with room: how many rows, and where each begins."""
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
    """To 1, 2, 3, 4, 6, 8, 12, 16, 24, ..."""
    power = 1
    while 2 * power <= rows:
        power *= 2
    return next(n for n in (power, power + power // 2, 2 * power) if n >= rows)
