"""What attention of whole sequences is, however it is computed."""

import abc
from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from grpo_eqx.models.attention import KeyValues, Segment


class Inputs(NamedTuple):
    """Each of the `K` heads of keys with the `r` heads of queries that read it."""

    queries: Float[Array, "P K R r T D"]
    own: KeyValues
    """Of the rows, `[P, K, R, T, D]`."""
    shared: KeyValues | None
    """Of the prompts, `[P, K, S, D]`."""


class Masks(NamedTuple):
    """What queries see, besides that a row's see nothing after themselves."""

    spans: Int[Array, "#P #R T"]
    """Which sequence each place of a row belongs to: queries see no other's."""
    visible: Bool[Array, "P S"] | None
    """Which places of the prompts all queries see."""


class CausalAttention(eqx.Module):
    """Softmax attention of each query over its row up to itself, and over its prompt.

    Differentiable once, in queries, keys and values. Products run in the dtype of the queries;
    scores, the softmax and sums over keys are float32.
    """

    def __call__(
        self,
        queries: Float[Array, "P R T N D"],
        own: KeyValues,
        shared: Segment | None = None,
        spans: Int[Array, "#P #R T"] | None = None,
    ) -> Float[Array, "P R T N D"]:
        """Attention of `R` rows for each of `P` prompts.

        **Arguments:** queries; keys and values of the rows, `[P, R, K, T, D]`; those of the
        prompts, `[P, 1, K, S, D]`, with a mask `[P, 1, S]`; which sequence each place of a row
        belongs to, where a query is to see no other's (`None`: a row is one sequence).
        """
        P, R, T, N, D = queries.shape
        K = own.keys.shape[2]
        inputs = Inputs(
            queries=queries.reshape(P, R, T, K, N // K, D).transpose(0, 3, 1, 4, 2, 5),
            own=KeyValues(*(x.swapaxes(1, 2) for x in own)),
            shared=None if shared is None else KeyValues(*(x[:, 0] for x in shared.kv)),
        )
        masks = Masks(
            spans=jnp.zeros((1, 1, T), jnp.int32) if spans is None else spans,
            visible=None if shared is None else shared.visible[:, 0],
        )
        return self.attend(inputs, masks).transpose(0, 2, 4, 1, 3, 5).reshape(P, R, T, N, D)

    @abc.abstractmethod
    def attend(self, inputs: Inputs, masks: Masks) -> Float[Array, "P K R r T D"]:
        """As a call, head by head."""
