"""Softmax attention accumulated over successive parts of the keys."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from grpo_eqx.models.product import product

MASKED = -1e30
"""Score of what a softmax leaves out: below every score, and finite, to keep differences finite."""


class RunningSoftmax(NamedTuple):
    """Unnormalized float32 attention over the keys so far (arXiv 2205.14135)."""

    weighted: Float[Array, "*queries D"]
    total: Float[Array, "*queries 1"]
    highest: Float[Array, "*queries 1"]

    @classmethod
    def over_nothing(cls, queries: Float[Array, "*queries D"]) -> "RunningSoftmax":
        zeros = jnp.zeros(queries.shape, jnp.float32)
        return cls(zeros, zeros[..., :1], jnp.full_like(zeros[..., :1], MASKED))

    def updated(
        self, scores: Float[Array, "*queries S"], values: Array, dims: str
    ) -> "RunningSoftmax":
        """Adds more keys; `dims` is the einsum of weights and values to the result."""
        highest = jnp.maximum(self.highest, scores.max(axis=-1, keepdims=True))
        weights = jnp.exp(scores - highest)
        decay = jnp.exp(self.highest - highest)
        weighted = product(dims, weights.astype(values.dtype), values)
        total = weights.sum(axis=-1, keepdims=True)
        return RunningSoftmax(self.weighted * decay + weighted, self.total * decay + total, highest)

    def attended(self, dtype: jnp.dtype) -> Float[Array, "*queries D"]:
        """Returns the normalized attention in `dtype`."""
        return (self.weighted / self.total).astype(dtype)

    def logsumexp(self) -> Float[Array, "*queries 1"]:
        """Returns the logarithm of each query's sum of exponentials."""
        return self.highest + jnp.log(self.total)
