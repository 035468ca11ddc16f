"""Log-probs without the whole logits, in plain XLA."""

import jax
from jaxtyping import Array, Float, Int

from grpo_eqx.common.shapes import Number
from grpo_eqx.loss_backends.base import LossBackend, TokenStats
from grpo_eqx.loss_backends.tiled import tiled_stats
from grpo_eqx.loss_backends.tiles import ScoreTiles, check_tiles


class ChunkedLoss(LossBackend):
    """Backend that computes logits tile by tile, and once more for the gradient of the head.

    At most `token_tile x vocabulary_tile` logits are computed at a time on a device. A vocabulary
    sharded over `tp` stays sharded: only sums over its parts are exchanged.
    """

    token_tile: int = 2048
    """Maximum tokens per tile, on one device."""
    vocabulary_tile: int = 2048
    """Maximum vocabulary entries per tile."""

    def __check_init__(self) -> None:
        check_tiles(self.token_tile, self.vocabulary_tile)

    def token_stats(
        self,
        hidden: Float[Array, "*batch T H"],
        head: Float[Array, "V H"],
        ids: Int[Array, "*batch T"],
        temperature: Number,
        mesh: jax.sharding.Mesh | None,
        softcap: float | None,
    ) -> TokenStats:
        tiles = ScoreTiles(self.token_tile, self.vocabulary_tile, softcap)
        return tiled_stats(hidden, head, ids, temperature, tiles, mesh)
