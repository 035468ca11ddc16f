"""Log-probs without the whole logits, in plain XLA."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from grpo_eqx.errors import UserError
from grpo_eqx.loss_backends.base import LossBackend, TokenStats
from grpo_eqx.loss_backends.softmax import Partial, ScoreGradient
from grpo_eqx.loss_backends.tiled import ScoreTiles, check_tiles, tiled_stats
from grpo_eqx.models.product import product
from grpo_eqx.models.softcap import gradient_before_cap, soft_capped


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
        temperature: float,
        mesh: jax.sharding.Mesh | None,
        softcap: float | None,
    ) -> TokenStats:
        tiles = _XlaTiles(self.token_tile, self.vocabulary_tile, softcap, self.max_kept_logits)
        return tiled_stats(hidden, head, ids, temperature, tiles, mesh)


@dataclasses.dataclass(frozen=True)
class _XlaTiles(ScoreTiles):
    tokens: int
    vocabulary: int
    softcap: float | None
    max_kept: int

    def scores(self, hidden: Float[Array, "n H"], head: Float[Array, "v H"]) -> Float[Array, "v n"]:
        return soft_capped(product("vh,nh->vn", head, hidden), self.softcap)

    def sums_from(
        self,
        scores: Float[Array, "v n"],
        ids: Int[Array, " n"],
        first: Int[Array, ""],
        temperature: float,
    ) -> Partial:
        return Partial.of_scores(scores, _own(scores, ids), _valid(scores, first), temperature)

    def gradient_from(
        self,
        scores: Float[Array, "v n"],
        ids: Int[Array, " n"],
        gradient: ScoreGradient,
        temperature: float,
    ) -> Float[Array, "v n"]:
        by_scores = gradient.at(scores, _own(scores, ids), temperature)
        return gradient_before_cap(by_scores, scores, self.softcap)

    def weighted_rows(
        self,
        hidden: Float[Array, "n H"],
        head: Float[Array, "v H"],
        ids: Int[Array, " n"],
        first: Int[Array, ""],
        temperature: float,
    ) -> tuple[Partial, Float[Array, "n H"]]:
        scores = self.scores(hidden, head)
        own, valid = _own(scores, ids), _valid(scores, first)
        sums = Partial.of_scores(scores, own, valid, temperature)
        weights = jnp.where(valid & ~own, jnp.exp((scores - sums.highest) / temperature), 0.0)
        weights = gradient_before_cap(weights, scores, self.softcap).astype(hidden.dtype)
        return sums.merged(temperature), product("vn,vh->nh", weights, head)


def _own(scores: Float[Array, "v n"], ids: Int[Array, " n"]) -> Bool[Array, "v n"]:
    """Returns True at each token's own score."""
    return ids == jnp.arange(len(scores))[:, None]


def _valid(scores: Float[Array, "v n"], first: Int[Array, ""]) -> Bool[Array, "v 1"]:
    """Returns True for the rows from `first` on."""
    return jnp.arange(len(scores))[:, None] >= first
