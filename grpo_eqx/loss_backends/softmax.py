"""Softmax over a vocabulary that is processed in parts: its sums and its gradient.

At temperature T, with scores s (hidden state times head), z = s / T and token y:

    logp = z_y - lse        lse = log sum exp(z)        H = lse - E[z]
    ds = [g_logp (1_y - p) - g_H p (log p + H) + g_lse p] / T

Scores are compared before they are divided, and everything is relative to the largest: for scores
in the hundreds, a quotient or a logsumexp has lost the digits that matter. A score of minus
infinity, such as that of an entry that may not be drawn, has probability 0 and adds nothing.

Scores are multiplied by 1 / T: XLA does so where T is a constant, but in a loop divides by a traced
one, which rounds otherwise and takes longer.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from grpo_eqx.common.shapes import Number
from grpo_eqx.loss_backends.base import TokenStats
from grpo_eqx.models.running_softmax import MASKED


class Partial(NamedTuple):
    """Per-token sums over a part of the vocabulary, float32."""

    highest: Float[Array, "*n"]
    """Largest score."""
    sums: Float[Array, "*n"]
    """Sum of exp((s - highest) / T)"""
    moments: Float[Array, "*n"]
    """Sum of (s - highest) / T exp((s - highest) / T)"""
    chosen: Float[Array, "*n"]
    """Score of the token itself, or 0 if it is not in this part."""

    @classmethod
    def of_nothing(cls, shape: tuple[int, ...]) -> "Partial":
        """Returns the sums over an empty part, for tokens of this shape."""
        zeros = jnp.zeros(shape, jnp.float32)
        return cls(zeros + MASKED, zeros, zeros, zeros)

    @classmethod
    def of_scores(
        cls,
        scores: Float[Array, "*scores"],
        own: Bool[Array, "*scores"],
        valid: Bool[Array, "*#scores"],
        temperature: Number | Float[Array, "*#scores"],
        axis: int = 0,
    ) -> "Partial":
        """Computes the sums over the `valid` scores along `axis`, which is kept with size 1.

        `own` marks each token's own score.
        """
        scores = jnp.where(valid, scores, MASKED)
        highest = jnp.maximum(scores.max(axis=axis, keepdims=True), MASKED)
        shifted = (scores - highest) * (1 / temperature)
        exps = jnp.exp(shifted)
        return cls(
            highest,
            exps.sum(axis=axis, keepdims=True),
            jnp.sum(jnp.where(exps > 0, shifted * exps, 0.0), axis=axis, keepdims=True),
            jnp.sum(jnp.where(own & valid, scores, 0.0), axis=axis, keepdims=True),
        )

    def factor(self, highest: Float[Array, "*#n"], temperature: Number) -> Float[Array, "*n"]:
        """Returns by what the sums change where another largest score takes the place of theirs."""
        return jnp.exp((self.highest - highest) * (1 / temperature))

    def relative_to(self, highest: Float[Array, "*#n"], temperature: Number) -> "Partial":
        """Rescales the sums to be relative to another largest score."""
        shift = (self.highest - highest) * (1 / temperature)
        factor = self.factor(highest, temperature)
        moments = jnp.where(factor > 0, (self.moments + shift * self.sums) * factor, 0.0)
        return Partial(highest, self.sums * factor, moments, self.chosen)

    def merged(self, temperature: Number) -> "Partial":
        """Merges parts stacked along dim 0 into the sums over all of them."""
        relative = self.relative_to(self.highest.max(axis=0), temperature)
        return Partial(relative.highest, *(x.sum(axis=0) for x in relative[1:]))

    def plus(self, other: "Partial", temperature: Number) -> "Partial":
        """Returns the sums over both parts."""
        return jax.tree.map(lambda a, b: jnp.stack([a, b]), self, other).merged(temperature)

    def over_axis(self, name: str, temperature: Number) -> "Partial":
        """Returns the sums over the parts that the devices along a mesh axis hold."""
        relative = self.relative_to(jax.lax.pmax(self.highest, name), temperature)
        return Partial(relative.highest, *jax.lax.psum(relative[1:], name))

    def stats(self, temperature: Number) -> TokenStats:
        """Returns the tokens' statistics, for sums over the whole vocabulary."""
        logsums = jnp.log(self.sums)
        return TokenStats(
            logps=(self.chosen - self.highest) * (1 / temperature) - logsums,
            entropies=logsums - self.moments / self.sums,
            logsumexps=self.highest * (1 / temperature) + logsums,
        )


class ScoreGradient(NamedTuple):
    """Per-token coefficients of the gradient of the scores, float32.

    ds = p (constant + slope log p) + own 1_y, with log p = (s - highest) / T - logsum
    """

    highest: Float[Array, "*n"]
    logsums: Float[Array, "*n"]
    constant: Float[Array, "*n"]
    slope: Float[Array, "*n"]
    own: Float[Array, "*n"]

    @classmethod
    def of(cls, sums: Partial, cotangents: TokenStats, temperature: Number) -> "ScoreGradient":
        """Derives coefficients from whole-vocabulary sums and their statistics' cotangents."""
        g = TokenStats(*(x * (1 / temperature) for x in cotangents))
        entropies = sums.stats(temperature).entropies
        constant = g.logsumexps - g.logps - g.entropies * entropies
        return cls(sums.highest, jnp.log(sums.sums), constant, -g.entropies, g.logps)

    def at(
        self,
        scores: Float[Array, "*scores"],
        own: Bool[Array, "*scores"],
        temperature: Number | Float[Array, "*#scores"],
    ) -> Float[Array, "*scores"]:
        """Returns ds for a part of the vocabulary; `own` marks each token's own score."""
        logprobs = (scores - self.highest) * (1 / temperature) - self.logsums
        probs = jnp.exp(logprobs)
        gradient = jnp.where(probs > 0, probs * (self.constant + self.slope * logprobs), 0.0)
        return gradient + jnp.where(own, self.own, 0.0)
