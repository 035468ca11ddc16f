"""Log-probs without the whole logits, in plain XLA."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from grpo_eqx.loss_backends.base import LossBackend, TokenStats
from grpo_eqx.loss_backends.softmax import Partial, ScoreGradient
from grpo_eqx.loss_backends.tiled import WeighingTiles, check_tiles, tiled_stats
from grpo_eqx.models.product import product
from grpo_eqx.models.softcap import gradient_before_cap, soft_capped


class ChunkedLoss(LossBackend):
    """Backend that computes logits tile by tile, and once more for the gradient of the head.

    At most `token_tile x vocabulary_tile` logits exist at a time on a device. A vocabulary sharded
    over `tp` stays sharded: only sums over its parts are exchanged.
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
        temperature: float,
        mesh: jax.sharding.Mesh | None,
        softcap: float | None,
    ) -> TokenStats:
        tiles = _XlaTiles(self.token_tile, self.vocabulary_tile, softcap)
        return tiled_stats(hidden, head, ids, temperature, tiles, mesh)


@dataclasses.dataclass(frozen=True)
class _XlaTiles(WeighingTiles):
    tokens: int
    vocabulary: int
    softcap: float | None

    def sums(
        self,
        hidden: Float[Array, "n H"],
        head: Float[Array, "v H"],
        ids: Int[Array, " n"],
        first: Int[Array, ""],
        temperature: float,
    ) -> Partial:
        scores, own = self._scores(hidden, head, ids)
        valid = jnp.arange(len(head))[:, None] >= first
        return Partial.of_scores(scores, own, valid, temperature)

    def weighted_rows(
        self,
        hidden: Float[Array, "n H"],
        head: Float[Array, "v H"],
        ids: Int[Array, " n"],
        first: Int[Array, ""],
        temperature: float,
    ) -> tuple[Partial, Float[Array, "n H"]]:
        scores, own = self._scores(hidden, head, ids)
        valid = jnp.arange(len(head))[:, None] >= first
        sums = Partial.of_scores(scores, own, valid, temperature)
        weights = jnp.where(valid & ~own, jnp.exp((scores - sums.highest) / temperature), 0.0)
        weights = gradient_before_cap(weights, scores, self.softcap).astype(hidden.dtype)
        return sums.merged(temperature), product("vn,vh->nh", weights, head)

    def score_gradient(
        self,
        hidden: Float[Array, "n H"],
        head: Float[Array, "v H"],
        ids: Int[Array, " n"],
        gradient: ScoreGradient,
        temperature: float,
    ) -> Float[Array, "v n"]:
        scores, own = self._scores(hidden, head, ids)
        by_scores = gradient.at(scores, own, temperature)
        return gradient_before_cap(by_scores, scores, self.softcap).astype(hidden.dtype)

    def _scores(
        self, hidden: Float[Array, "n H"], head: Float[Array, "v H"], ids: Int[Array, " n"]
    ) -> tuple[Float[Array, "v n"], Bool[Array, "v n"]]:
        """Returns the capped scores, and a mask that is True at each token's own."""
        scores = soft_capped(product("vh,nh->vn", head, hidden), self.softcap)
        return scores, ids == jnp.arange(len(head))[:, None]
