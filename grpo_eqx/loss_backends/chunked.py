"""Log-probs without the whole logits, in plain XLA."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from grpo_eqx.errors import UserError
from grpo_eqx.loss_backends.base import LossBackend, TokenStats
from grpo_eqx.loss_backends.softmax import LogitGradient, Partial, product
from grpo_eqx.loss_backends.tiled import Tiles, tiled_stats


class ChunkedLoss(LossBackend):
    """Goes over tiles of the logits, and in the backward pass computes each of them again.

    At most `token_tile x vocabulary_tile` logits exist at a time on a device. A vocabulary that is
    split over `tp` stays so: only sums over its parts are exchanged.
    """

    token_tile: int = 2048
    """Tokens of a tile, on one device."""
    vocabulary_tile: int = 2048
    """Entries of the vocabulary of a tile."""

    def __check_init__(self) -> None:
        for name in ("token_tile", "vocabulary_tile"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}: it must be at least 1.")

    def __call__(
        self,
        hidden: Float[Array, "*batch T H"],
        head: Float[Array, "V H"],
        ids: Int[Array, "*batch T"],
        temperature: float,
        mesh: jax.sharding.Mesh | None = None,
    ) -> TokenStats:
        tiles = _XlaTiles(self.token_tile, self.vocabulary_tile)
        return tiled_stats(hidden, head, ids, temperature, tiles, mesh)


@dataclasses.dataclass(frozen=True)
class _XlaTiles(Tiles):
    tokens: int
    vocabulary: int

    def sums(
        self,
        hidden: Float[Array, "n H"],
        head: Float[Array, "v H"],
        ids: Int[Array, " n"],
        first: Int[Array, ""],
        temperature: float,
    ) -> Partial:
        z, own = _logits(hidden, head, ids, temperature)
        return Partial.of_logits(z, own, jnp.arange(len(head))[:, None] >= first)

    def logit_gradient(
        self,
        hidden: Float[Array, "n H"],
        head: Float[Array, "v H"],
        ids: Int[Array, " n"],
        gradient: LogitGradient,
        temperature: float,
    ) -> Float[Array, "v n"]:
        z, own = _logits(hidden, head, ids, temperature)
        return gradient.at(z, own).astype(hidden.dtype)


def _logits(
    hidden: Float[Array, "n H"],
    head: Float[Array, "v H"],
    ids: Int[Array, " n"],
    temperature: float,
) -> tuple[Float[Array, "v n"], Bool[Array, "v n"]]:
    """Logits divided by the temperature, and where each token's own is."""
    z = product("vh,nh->vn", head, hidden) / temperature
    return z, ids == jnp.arange(len(head))[:, None]
