"""Sampling of the next token, with its log-prob."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from grpo_eqx.common import random_keys
from grpo_eqx.models.tiles import filled
from grpo_eqx.settings.types import (
    NonNegativeFloat,
    PositiveInt,
    PositiveShare,
    Share,
    convert_settings,
)

_MOST_IN_ONE_STAGE = 512
"""Tokens of the largest vocabulary that is not drawn from in parts."""
_PART = 128
"""Tokens of a part of a larger one. Another number would give other draws."""


class Sampling(eqx.Module):
    """Sampling parameters. Truncations apply in field order, each to the tokens that remain.

    All but `top_k` are data for `jax.jit`: others compile nothing again. What does not apply is
    `None`, whatever number was given for that, and left out of the program.
    """

    _: dataclasses.KW_ONLY
    temperature: NonNegativeFloat | None = 1.0
    """Divisor of the logits before the softmax; 0 means greedy. In compiled programs, it and the
    next two may be arrays that broadcast against logits, with a number for each row."""
    top_k: PositiveInt | None = eqx.field(static=True, default=None)
    """Number of most likely tokens to keep (`None`: all); ties go to the lowest ids."""
    top_p: PositiveShare | None = 1.0
    """Minimum total probability to keep, in the smallest set of most likely tokens; ties go to the
    lowest ids."""
    min_p: Share | None = 0.0
    """Minimum probability of a token to keep, as a fraction of the most likely token's."""

    def __post_init__(self) -> None:
        convert_settings(self)
        for name, without in (("temperature", 0), ("top_p", 1), ("min_p", 0)):
            if getattr(self, name) == without:
                object.__setattr__(self, name, None)


GREEDY = Sampling(temperature=0.0)


def shapes_of_each(sampling: Sampling, number: int, sharding: jax.sharding.Sharding) -> Sampling:
    """Returns the shapes of sampling that has numbers for each of `number` rows."""
    shape = jax.ShapeDtypeStruct((number, 1, 1), jnp.float32, sharding=sharding)
    truncates = sampling.top_p is not None or sampling.min_p is not None
    return eqx.tree_at(
        lambda x: (x.temperature, x.top_p, x.min_p),
        Sampling(top_k=sampling.top_k),
        (shape, *[shape if truncates else None] * 2),
        is_leaf=lambda x: x is None,
    )


def sample_tokens(
    logits: Float[Array, "*batch V"], keys: Key[Array, "*batch"], sampling: Sampling
) -> tuple[Int[Array, "*batch"], Float[Array, "*batch"]]:
    """Draws one token per row, each with its own key.

    **Returns:** the tokens, and their float32 log-probs under the tempered and truncated
    distribution they were drawn from. A greedy token comes from a point mass, so its log-prob
    is 0.
    """
    if sampling.temperature is None:
        tokens = _first_highest(logits)
        return tokens, jnp.zeros(tokens.shape, jnp.float32)
    if jnp.ndim(sampling.temperature):
        return _sample_rows(logits, keys, sampling)
    logits = _truncate(logits.astype(jnp.float32) * (1 / sampling.temperature), sampling)
    if logits.shape[-1] > _MOST_IN_ONE_STAGE:
        return _draw_in_stages(logits, keys)
    return _draw(logits, keys)


def _sample_rows(
    logits: Float[Array, "*batch V"], keys: Key[Array, "*batch"], sampling: Sampling
) -> tuple[Int[Array, "*batch"], Float[Array, "*batch"]]:
    """Draws tokens with a temperature for each row, some of which may be 0."""
    is_greedy = jnp.equal(jnp.asarray(sampling.temperature), 0)
    divisors = jnp.where(is_greedy, 1.0, jnp.asarray(sampling.temperature))
    at_one = eqx.tree_at(lambda x: x.temperature, sampling, 1.0)
    tokens, logps = sample_tokens(logits.astype(jnp.float32) * (1 / divisors), keys, at_one)
    is_greedy = jnp.broadcast_to(is_greedy[..., 0], tokens.shape)
    return jnp.where(is_greedy, _first_highest(logits), tokens), jnp.where(is_greedy, 0.0, logps)


def _draw(
    logits: Float[Array, "*batch V"], keys: Key[Array, "*batch"]
) -> tuple[Int[Array, "*batch"], Float[Array, "*batch"]]:
    """Draws tokens, and returns their log-probs."""
    tokens, chosen = _drawn(logits, _noise(keys, logits.shape[-1]))
    return tokens, chosen - jax.nn.logsumexp(logits, axis=-1)


def _draw_in_stages(
    logits: Float[Array, "*batch V"], keys: Key[Array, "*batch"]
) -> tuple[Int[Array, "*batch"], Float[Array, "*batch"]]:
    """Draws parts of the vocabulary, then a token of each, and returns their log-probs.

    The logit of a part is the logarithm of its sum of exponentials, so each token has the
    probability that it would have in a single draw. Noise is needed for the parts and for the
    tokens of one, instead of for every token.
    """
    # A part is every n-th token, so that devices which share the vocabulary all hold some of it.
    by_part = filled(logits, -1, _PART, -jnp.inf).reshape(*logits.shape[:-1], _PART, -1)
    num_parts = by_part.shape[-1]
    highest = by_part.max(axis=(-2, -1))
    sums = jnp.exp(by_part - highest[..., None, None]).sum(axis=-2)
    of_tokens, of_parts = jnp.split(_noise(keys, _PART + num_parts), [_PART], axis=-1)
    part, _ = _drawn(jnp.log(sums), of_parts)
    in_part = jnp.take_along_axis(by_part, part[..., None, None], axis=-1)[..., 0]
    place, chosen = _drawn(in_part, of_tokens)
    # Where logits are NaN, the last place of the last part is found, which may be a filled one.
    tokens = jnp.minimum(place * num_parts + part, logits.shape[-1] - 1)
    return tokens, chosen - highest - jnp.log(sums.sum(axis=-1))


def _drawn(
    logits: Float[Array, "*batch n"], noise: Float[Array, "*batch n"]
) -> tuple[Int[Array, "*batch"], Float[Array, "*batch"]]:
    """Returns the indices that Gumbel noise selects, and their logits."""
    # Gumbel-max keeps a draw the same under the rounding noise of another device layout;
    # inverting a cumulative sum over the vocabulary would not.
    index = _first_highest(logits + noise)
    return index, jnp.take_along_axis(logits, index[..., None], axis=-1)[..., 0]


def _noise(keys: Key[Array, "*batch"], size: int) -> Float[Array, "*batch {size}"]:
    return jnp.vectorize(lambda key: random_keys.gumbel(key, size), signature="()->(n)")(keys)


def _first_highest(scores: Float[Array, "*batch V"]) -> Int[Array, "*batch"]:
    """Computes `jnp.argmax` as two single-value reductions, which XLA's CPU compiler vectorizes."""
    last = scores.shape[-1] - 1
    found = scores == scores.max(axis=-1, keepdims=True)
    return jnp.where(found, jnp.arange(last + 1, dtype=jnp.int32), last).min(axis=-1)


def _truncate(logits: Float[Array, "*batch V"], sampling: Sampling) -> Float[Array, "*batch V"]:
    """Sets the logits of tokens that may not be drawn to minus infinity."""
    vocab_size = logits.shape[-1]
    if sampling.top_k is not None and sampling.top_k < vocab_size:
        lowest = jax.lax.top_k(logits, sampling.top_k)[0][..., -1:]
        logits = _keep_highest(logits, lowest, sampling.top_k)
    if sampling.top_p is not None:
        descending = jnp.sort(logits, axis=-1, descending=True)
        probs = jax.nn.softmax(descending, axis=-1)
        before = jnp.cumsum(probs, axis=-1) - probs
        kept = before < sampling.top_p
        lowest = jnp.min(jnp.where(kept, descending, jnp.inf), axis=-1, keepdims=True)
        logits = _keep_highest(logits, lowest, kept.sum(axis=-1, keepdims=True))
    if sampling.min_p is not None:
        lowest = logits.max(axis=-1, keepdims=True) + jnp.log(sampling.min_p)
        logits = jnp.where(logits < lowest, -jnp.inf, logits)
    return logits


def _keep_highest(
    logits: Float[Array, "*batch V"],
    lowest: Float[Array, "*batch 1"],
    count: int | Int[Array, "*batch 1"],
) -> Float[Array, "*batch V"]:
    """Keeps the `count` highest logits, the least of which is `lowest`; of ties, the first."""
    above, tied = logits > lowest, logits == lowest
    room = count - above.sum(axis=-1, keepdims=True)
    kept = above | (tied & (jnp.cumsum(tied, axis=-1) <= room))
    return jnp.where(kept, logits, -jnp.inf)
