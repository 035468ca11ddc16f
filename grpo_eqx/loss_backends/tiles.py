"""Computation of one tile of tokens x vocabulary, which `tiled_stats` loops over."""

import abc
import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from grpo_eqx.common.errors import UserError
from grpo_eqx.common.shapes import Number
from grpo_eqx.loss_backends.softmax import Partial, ScoreGradient
from grpo_eqx.models.product import product
from grpo_eqx.models.softcap import gradient_before_cap, soft_capped


class Tiles(abc.ABC):
    """Computation of a tile of the scores on one device; hashable."""

    tokens: int
    """Maximum tokens per tile."""
    vocabulary: int
    """Maximum rows of the head per tile."""
    softcap: float | None
    """Soft cap of the scores, before they are divided by the temperature."""

    @abc.abstractmethod
    def sums(
        self,
        hidden: Float[Array, "n H"],
        head: Float[Array, "v H"],
        ids: Int[Array, " n"],
        first: Int[Array, ""],
        temperature: Number,
    ) -> Partial:
        """Computes sums over the head's rows from `first` on, `[parts, n]` for any number of parts.

        `ids` are relative to row 0 of the tile.
        """

    @abc.abstractmethod
    def score_gradient(
        self,
        hidden: Float[Array, "n H"],
        head: Float[Array, "v H"],
        ids: Int[Array, " n"],
        gradient: ScoreGradient,
        temperature: Number,
    ) -> Float[Array, "v n"]:
        """Computes the gradient of the tile's scores before their cap, in the dtype of `hidden`."""


@dataclasses.dataclass(frozen=True)
class ScoreTiles(Tiles):
    """Tiles whose scores are arrays, in plain XLA.

    They can add up rows of the head too, where these are not trained: that yields the gradient of
    log-probs without a second pass.
    """

    tokens: int
    vocabulary: int
    softcap: float | None

    def scores(self, hidden: Float[Array, "n H"], head: Float[Array, "v H"]) -> Float[Array, "v n"]:
        """Computes the scores, float32, under their cap."""
        return soft_capped(product("vh,nh->vn", head, hidden), self.softcap)

    def sums(
        self,
        hidden: Float[Array, "n H"],
        head: Float[Array, "v H"],
        ids: Int[Array, " n"],
        first: Int[Array, ""],
        temperature: Number,
    ) -> Partial:
        scores = self.scores(hidden, head)
        return Partial.of_scores(scores, _own(scores, ids), _valid(scores, first), temperature)

    def score_gradient(
        self,
        hidden: Float[Array, "n H"],
        head: Float[Array, "v H"],
        ids: Int[Array, " n"],
        gradient: ScoreGradient,
        temperature: Number,
    ) -> Float[Array, "v n"]:
        scores = self.scores(hidden, head)
        by_scores = gradient.at(scores, _own(scores, ids), temperature)
        return gradient_before_cap(by_scores, scores, self.softcap).astype(hidden.dtype)

    def weighted_rows(
        self,
        hidden: Float[Array, "n H"],
        head: Float[Array, "v H"],
        ids: Int[Array, " n"],
        first: Int[Array, ""],
        temperature: Number,
    ) -> tuple[Partial, Float[Array, "n H"]]:
        """Computes `sums` in one part, and a weighted sum of the rows of the head, float32.

        The weight of a row is its exponential in `sums`, times the slope of the cap at its score.
        The row of the token itself is left out.
        """
        scores = self.scores(hidden, head)
        own, valid = _own(scores, ids), _valid(scores, first)
        sums = Partial.of_scores(scores, own, valid, temperature)
        weights = jnp.where(valid & ~own, jnp.exp((scores - sums.highest) * (1 / temperature)), 0.0)
        weights = gradient_before_cap(weights, scores, self.softcap).astype(hidden.dtype)
        return sums.merged(temperature), product("vn,vh->nh", weights, head)


def _own(scores: Float[Array, "v n"], ids: Int[Array, " n"]) -> Bool[Array, "v n"]:
    """Returns True at each token's own score."""
    return ids == jnp.arange(len(scores))[:, None]


def _valid(scores: Float[Array, "v n"], first: Int[Array, ""]) -> Bool[Array, "v 1"]:
    """Returns True for the rows from `first` on."""
    return jnp.arange(len(scores))[:, None] >= first


def check_tiles(token_tile: int, vocabulary_tile: int) -> None:
    """Raises `UserError` for tile sizes that are not whole numbers, or below 1."""
    for name, size in (("token_tile", token_tile), ("vocabulary_tile", vocabulary_tile)):
        if type(size) is not int or size < 1:
            raise UserError(f"{name} is {size!r}: it must be a whole number, at least 1.")
