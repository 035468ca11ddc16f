"""What a loss backend computes: log-probs of tokens, from hidden states and the head."""

import abc
from typing import NamedTuple

import equinox as eqx
from jaxtyping import Array, Float, Int


class TokenStats(NamedTuple):
    """Per-token statistics of the softmax over the vocabulary at the given temperature, float32."""

    logps: Float[Array, "*batch T"]
    """Log-probability of the token."""
    entropies: Float[Array, "*batch T"]
    """Entropy of the distribution the token was drawn from, in nats."""
    logsumexps: Float[Array, "*batch T"]
    """Log of the softmax' denominator, of the logits divided by the temperature."""


class LossBackend(eqx.Module):
    """Maps final hidden states and the language-model head to `TokenStats`.

    A backend is differentiable in `hidden` and `head`, for any cotangents of the three outputs.
    Products run in the dtype of `hidden`; statistics, and the accumulation of the head's gradient,
    are float32.
    """

    @abc.abstractmethod
    def __call__(
        self,
        hidden: Float[Array, "*batch T H"],
        head: Float[Array, "V H"],
        ids: Int[Array, "*batch T"],
        temperature: float,
    ) -> TokenStats:
        """Statistics of `ids` under `softmax(hidden @ head.T / temperature)`."""
