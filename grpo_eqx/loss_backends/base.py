"""What a loss backend computes: log-probs of tokens, from hidden states and the head."""

import abc
import math
import numbers
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from grpo_eqx.errors import UserError


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
    and it has no gradient, whatever its hidden state is.
    """

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
        as a parameter; without, everything is on one device. Raises `UserError` for shapes that do
        not fit each other, and for a temperature that is not a positive number.
        """
        if hidden.shape != (*ids.shape, head.shape[1]):
            raise UserError(
                f"hidden states {list(hidden.shape)}, ids {list(ids.shape)} and head "
                f"{list(head.shape)} do not fit: they must be [..., T, H], [..., T] and [V, H]."
            )
        temperature = checked_temperature(temperature)
        counted = in_vocabulary(ids, len(head))
        hidden = jnp.where(counted[..., None], hidden, 0)
        ids = jnp.where(counted, ids, 0)
        return self.token_stats(hidden, head, ids, temperature, mesh).where(counted)

    @abc.abstractmethod
    def token_stats(
        self,
        hidden: Float[Array, "*batch T H"],
        head: Float[Array, "V H"],
        ids: Int[Array, "*batch T"],
        temperature: float,
        mesh: jax.sharding.Mesh | None,
    ) -> TokenStats:
        """As a call, for ids that are all in the vocabulary."""


def in_vocabulary(ids: Int[Array, "*batch T"], vocabulary: int) -> Bool[Array, "*batch T"]:
    """True where a token is not ignored."""
    return (ids >= 0) & (ids < vocabulary)


def checked_temperature(temperature: float) -> float:
    """The temperature as a Python number; raises `UserError` where it is not a positive one."""
    if isinstance(temperature, jax.core.Tracer):
        raise UserError("temperature is traced: it must be a Python number, fixed when compiled.")
    if isinstance(temperature, jax.Array | numbers.Real):
        temperature = float(temperature)
        if 0 < temperature < math.inf:
            return temperature
    raise UserError(f"temperature is {temperature!r}: it must be a positive number.")
