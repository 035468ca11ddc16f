"""The softmax over a vocabulary of which only a part is at hand: its sums, and its gradient.

At temperature T, with z the logits divided by T and y the token:

    logp = z_y - lse        lse = log sum exp(z)        H = lse - E[z]
    dz = [g_logp (1_y - p) - g_H p (log p + H) + g_lse p] / T

Everything is relative to the largest logit: where logits are in the hundreds, their logsumexp has
lost the digits that count.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from grpo_eqx.loss_backends.base import TokenStats

# Finite, so that its differences are, and below every logit.
LOWEST = -1e30


def product(subscripts: str, a: Array, b: Array) -> Float[Array, "..."]:
    """The einsum of two arrays of one dtype, summed in float32.

    For float32 that means true float32 products, which TPUs and GPUs otherwise round.
    """
    exact = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(subscripts, a, b, precision=exact, preferred_element_type=jnp.float32)


class Partial(NamedTuple):
    """Sums over a part of the vocabulary, for each token, float32."""

    highest: Float[Array, "*n"]
    """The largest logit."""
    sums: Float[Array, "*n"]
    """sum of exp(z - highest)"""
    moments: Float[Array, "*n"]
    """sum of (z - highest) exp(z - highest)"""
    chosen: Float[Array, "*n"]
    """The token's own logit, or 0 where it is not in this part."""

    @classmethod
    def of_nothing(cls, num_tokens: int) -> "Partial":
        """The sums over no part."""
        zeros = jnp.zeros(num_tokens, jnp.float32)
        return cls(zeros + LOWEST, zeros, zeros, zeros)

    @classmethod
    def of_logits(
        cls, z: Float[Array, "v n"], own: Bool[Array, "v n"], valid: Bool[Array, "v #n"]
    ) -> "Partial":
        """The sums over the `valid` rows of z, as `[1, n]`; `own` marks each token's own."""
        z = jnp.where(valid, z, LOWEST)
        highest = z.max(axis=0, keepdims=True)
        shifted = z - highest
        exps = jnp.exp(shifted)
        return cls(
            highest,
            exps.sum(axis=0, keepdims=True),
            jnp.sum(shifted * exps, axis=0, keepdims=True),
            jnp.sum(jnp.where(own & valid, z, 0.0), axis=0, keepdims=True),
        )

    def relative_to(self, highest: Float[Array, "*#n"]) -> "Partial":
        """The same sums relative to another largest logit."""
        shift = self.highest - highest
        factor = jnp.exp(shift)
        moments = (self.moments + shift * self.sums) * factor
        return Partial(highest, self.sums * factor, moments, self.chosen)

    def merged(self) -> "Partial":
        """The sums over all parts, which lie along axis 0."""
        relative = self.relative_to(self.highest.max(axis=0))
        return Partial(relative.highest, *(x.sum(axis=0) for x in relative[1:]))

    def plus(self, other: "Partial") -> "Partial":
        """The sums over both parts."""
        return jax.tree.map(lambda a, b: jnp.stack([a, b]), self, other).merged()

    def over_axis(self, name: str) -> "Partial":
        """The sums over the parts that the devices along a mesh axis hold."""
        relative = self.relative_to(jax.lax.pmax(self.highest, name))
        return Partial(relative.highest, *jax.lax.psum(relative[1:], name))

    def stats(self) -> TokenStats:
        """What the whole vocabulary's sums say of the tokens."""
        logsums = jnp.log(self.sums)
        entropies = logsums - self.moments / self.sums
        return TokenStats((self.chosen - self.highest) - logsums, entropies, self.highest + logsums)


class LogitGradient(NamedTuple):
    """What the gradient of each token's logits is made of, float32.

    dz = exp(log p) (constant + slope log p) + own 1_y, with log p = (z - highest) - logsum
    """

    highest: Float[Array, "*n"]
    logsums: Float[Array, "*n"]
    constant: Float[Array, "*n"]
    slope: Float[Array, "*n"]
    own: Float[Array, "*n"]

    @classmethod
    def of(cls, sums: Partial, cotangents: TokenStats, temperature: float) -> "LogitGradient":
        """For cotangents of the statistics that the whole vocabulary's sums gave."""
        g = TokenStats(*(x / temperature for x in cotangents))
        stats = sums.stats()
        constant = g.logsumexps - g.logps - g.entropies * stats.entropies
        return cls(sums.highest, jnp.log(sums.sums), constant, -g.entropies, g.logps)

    def at(self, z: Float[Array, "v n"], own: Bool[Array, "v n"]) -> Float[Array, "v n"]:
        """The gradient dz for a part of the vocabulary's logits; `own` marks each token's own."""
        logprobs = (z - self.highest) - self.logsums
        dz = jnp.exp(logprobs) * (self.constant + self.slope * logprobs)
        return dz + jnp.where(own, self.own, 0.0)
