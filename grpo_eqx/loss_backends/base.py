"""Interface of loss backends: log-probs of tokens, from hidden states and the head."""

import abc
import math
import numbers
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from grpo_eqx.common.errors import UserError
from grpo_eqx.common.shapes import Number


class TokenStats(NamedTuple):
    """Per-token statistics of the softmax over the vocabulary at the given temperature, float32."""

    logps: Float[Array, "*batch T"]
    """Log-probability of the token."""
    entropies: Float[Array, "*batch T"]
    """Entropy of the softmax, in nats."""
    logsumexps: Float[Array, "*batch T"]
    """Log of the softmax's denominator: the logsumexp of the logits over the temperature."""

    def where(self, mask: Bool[Array, "*batch T"]) -> "TokenStats":
        """Returns the statistics where `mask` is True; elsewhere 0, without gradient."""
        return TokenStats(*(jnp.where(mask, x, 0.0) for x in self))


class LossBackend(eqx.Module):
    """Map from final hidden states and the language-model head to `TokenStats`.

    A backend is differentiable in `hidden` and `head`, for any cotangents of the three outputs.
    Products run in the dtype of `hidden`; statistics, and the accumulation of both gradients, are
    float32. A token whose id is not in the vocabulary (-100, say) is ignored: its statistics are 0,
    and it gets no gradient, whatever its hidden state.
    """

    def __call__(
        self,
        hidden: Float[Array, "*batch T H"],
        head: Float[Array, "V H"],
        ids: Int[Array, "*batch T"],
        temperature: Number,
        mesh: jax.sharding.Mesh | None = None,
        softcap: float | None = None,
    ) -> TokenStats:
        """Returns the statistics of `ids` under `softmax(hidden @ head.T / temperature)`.

        With a soft cap, logits are `softcap * tanh(hidden @ head.T / softcap)`, which are then
        divided by the temperature (Gemma 2, arXiv 2408.00118).

        With a mesh, `hidden` is `[P, G, T, H]` and laid out as `batch_sharding` says, and the head
        as a parameter; without one, everything is on one device. Raises `UserError` for
        incompatible shapes, and for a temperature or soft cap that is not a positive number. The
        temperature can be traced, and is not checked then.
        """
        if hidden.shape != (*ids.shape, head.shape[1]):
            raise UserError(
                f"hidden states {list(hidden.shape)}, ids {list(ids.shape)} and head "
                f"{list(head.shape)} do not match: they must be [..., T, H], [..., T] and [V, H]."
            )
        if not isinstance(temperature, jax.core.Tracer):
            temperature = checked_positive("temperature", temperature)
        softcap = None if softcap is None else checked_positive("softcap", softcap)
        counted = in_vocabulary(ids, len(head))
        hidden = jnp.where(counted[..., None], hidden, 0)
        ids = jnp.where(counted, ids, 0)
        stats = self.token_stats(hidden, head, ids, temperature, mesh, softcap)
        self._check(stats, ids.shape)
        return stats.where(counted)

    def _check(self, stats: TokenStats, shape: tuple[int, ...]) -> None:
        """Refuses what a backend of someone else's returns by mistake."""
        name = type(self).__name__
        if not isinstance(stats, TokenStats):
            raise UserError(f"{name} returned a {type(stats).__name__}: return TokenStats.")
        for field, x in stats._asdict().items():
            if not isinstance(x, jax.Array):
                raise UserError(
                    f"{name} returned {field} as a {type(x).__name__}: return a float32 "
                    f"jax.Array of the shape of ids, {list(shape)}."
                )
            if x.shape != shape or x.dtype != jnp.float32:
                raise UserError(
                    f"{name} returned {field} of shape {list(x.shape)} and dtype {x.dtype}: they "
                    f"must be float32, of the shape of ids, {list(shape)}."
                )

    @abc.abstractmethod
    def token_stats(
        self,
        hidden: Float[Array, "*batch T H"],
        head: Float[Array, "V H"],
        ids: Int[Array, "*batch T"],
        temperature: Number,
        mesh: jax.sharding.Mesh | None,
        softcap: float | None,
    ) -> TokenStats:
        """Computes what a call returns, for ids that are all in the vocabulary.

        **Arguments:**

        - `hidden`: final hidden states, in the dtype of the products.
        - `head`: the language-model head, float32 where it is trained.
        - `ids`: tokens to compute statistics of.
        - `temperature`: positive divisor of the logits, traced in training.
        - `mesh`: the devices; `None` for one.
        - `softcap`: soft cap of the logits; `None` for none.
        """


def in_vocabulary(ids: Int[Array, "*batch T"], vocabulary: int) -> Bool[Array, "*batch T"]:
    """Returns True for tokens that are not ignored."""
    return (ids >= 0) & (ids < vocabulary)


def checked_positive(name: str, number: Number) -> float:
    """Returns a number as a float; raises `UserError` unless it is positive and finite."""
    if isinstance(number, jax.core.Tracer):
        raise UserError(f"{name} is traced: it must be a Python number, fixed at compile time.")
    if isinstance(number, jax.Array | numbers.Real):
        number = float(number)
        if 0 < number < math.inf:
            return number
    raise UserError(f"{name} is {number!r}: it must be a positive number.")
