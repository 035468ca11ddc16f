"""What a loss backend computes: log-probs of tokens, from hidden states and the head."""

import abc
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class TokenStats(NamedTuple):
    """Per-token statistics of the softmax over the vocabulary at the given temperature, float32."""

    logps: Float[Array, "*batch T"]
    """Log-probability of the token."""
    entropies: Float[Array, "*batch T"]
    """Entropy of the distribution the token was drawn from, in nats."""
    logsumexps: Float[Array, "*batch T"]
    """Log of the softmax' denominator, of the logits divided by the temperature."""

    def where(self, mask: Bool[Array, "*batch T"]) -> "TokenStats":
        """The statistics where `mask` is True, and elsewhere 0, without gradient."""
        return TokenStats(*(jnp.where(mask, x, 0.0) for x in self))


class LossBackend(eqx.Module):
    """Maps final hidden states and the language-model head to `TokenStats`.

    A backend is differentiable in `hidden` and `head`, for any cotangents of the three outputs.
    Products run in the dtype of `hidden`; statistics, and the accumulation of both gradients, are
    float32. A token whose id is not in the vocabulary (-100, say) is ignored: its statistics are 0,
    and it has no gradient.
    """

    @abc.abstractmethod
    def __call__(
        self,
        hidden: Float[Array, "*batch T H"],
        head: Float[Array, "V H"],
        ids: Int[Array, "*batch T"],
        temperature: float,
        mesh: jax.sharding.Mesh | None = None,
    ) -> TokenStats:
        """Statistics of `ids` under `softmax(hidden @ head.T / temperature)`.

        With a mesh, `hidden` is `[P, G, T, H]` and laid out as `batch_sharding` says, and the head
        as a parameter; without, everything is on one device.
        """


def in_vocabulary(ids: Int[Array, "*batch T"], vocabulary: int) -> Bool[Array, "*batch T"]:
    """True where a token is not ignored."""
    return (ids >= 0) & (ids < vocabulary)
