"""Log-probs without the whole logits, in plain XLA."""

import jax
from jaxtyping import Array, Float, Int

from grpo_eqx.common.errors import UserError
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
    max_kept_logits: int = 0
    """Maximum number of logits, of 4 bytes each, that a device keeps for the backward pass of a
    call. If there are more, all are recomputed."""

    def __check_init__(self) -> None:
        check_tiles(self.token_tile, self.vocabulary_tile)
        kept = self.max_kept_logits
        if type(kept) is not int or kept < 0:
            raise UserError(f"max_kept_logits is {kept!r}: it must be a whole number, at least 0.")

    def token_stats(
        self,
        hidden: Float[Array, "*batch T H"],
        head: Float[Array, "V H"],
        ids: Int[Array, "*batch T"],
        temperature: Number,
        mesh: jax.sharding.Mesh | None,
        softcap: float | None,
    ) -> TokenStats:
        tiles = ScoreTiles(self.token_tile, self.vocabulary_tile, softcap, self.max_kept_logits)
        return tiled_stats(hidden, head, ids, temperature, tiles, mesh)
