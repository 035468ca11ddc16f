"""Attention of one position at a time, over segments of keys and values.

Queries come as `[P, G, ...]`: `P` prompts with `G` continuations each. A list of *segments* is read
and merged exactly, so that a group's prompt is held and read once, not once per continuation.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int8, Num

from grpo_eqx.models.running_softmax import MASKED, RunningSoftmax, product

_TINY = 1e-30  # of a key of zeros, the scale

CACHE_BLOCK = 128
"""Positions of a growing cache that attention reads at a time."""


class KeyValues(NamedTuple):
    """Keys and values of `J` rows per prompt: `J = 1` where the group shares them, else `J = G`."""

    keys: Float[Array, "*layers P J K S D"]
    values: Float[Array, "*layers P J K S D"]


class KVCache(NamedTuple):
    """Keys and values as they are kept: in a float dtype, or as int8 with a scale for each."""

    keys: Float[Array, "*layers P J K S D"] | Int8[Array, "*layers P J K S D"]
    values: Float[Array, "*layers P J K S D"] | Int8[Array, "*layers P J K S D"]
    key_scales: Float[Array, "*layers P J K S 1"] | None = None
    value_scales: Float[Array, "*layers P J K S 1"] | None = None

    @classmethod
    def of(cls, kv: KeyValues, dtype: jnp.dtype) -> "KVCache":
        """Rounded to `dtype`; with int8 the largest number of each head and place becomes 127."""
        if dtype != jnp.int8:
            return cls(*(x.astype(dtype) for x in kv))
        scales = [jnp.max(jnp.abs(x.astype(jnp.float32)), -1, keepdims=True) / 127 for x in kv]
        rounded = [
            jnp.round(x / jnp.maximum(scale, _TINY)).astype(jnp.int8)
            for x, scale in zip(kv, scales, strict=True)
        ]
        return cls(*rounded, *scales)

    def loaded(self, dtype: jnp.dtype) -> KeyValues:
        """The numbers in the dtype that attention computes in."""
        if self.key_scales is None or self.value_scales is None:
            return KeyValues(self.keys.astype(dtype), self.values.astype(dtype))
        keys, values = self.keys * self.key_scales, self.values * self.value_scales
        return KeyValues(keys.astype(dtype), values.astype(dtype))


class Segment(NamedTuple):
    """A stretch of keys and values, and which of them each row's queries see (broadcastable)."""

    kv: KeyValues
    visible: Bool[Array, "#P #J S"]


class Past(NamedTuple):
    """A layer's part of a cache that grows: each query sees the keys before its own place."""

    kv: KVCache
    """Of all layers, in whole blocks of `CACHE_BLOCK`, or one shorter block."""
    layer: Int[Array, ""]
    place: Int[Array, "P G"]
    num_written: Int[Array, ""]
    """Blocks from here on are not read: no query that counts has a larger place."""

    def block(self, number: Int[Array, ""], dtype: jnp.dtype) -> Segment:
        """The segment of one block, in `dtype`."""
        size = min(CACHE_BLOCK, self.kv.keys.shape[-2])
        first = number * size

        def cut(x: Num[Array, "L P G K S D"]) -> Num[Array, "P G K B D"]:
            _, P, G, K, _, D = x.shape
            # Of one type also where JAX's integers have 64 bits.
            start = [jnp.asarray(i, jnp.int32) for i in (self.layer, 0, 0, 0, first, 0)]
            return jax.lax.dynamic_slice(x, start, (1, P, G, K, size, D))[0]

        visible = first + jnp.arange(size) < self.place[..., None]
        return Segment(jax.tree.map(cut, self.kv).loaded(dtype), visible)

    def num_blocks(self) -> Int[Array, ""]:
        """How many blocks hold anything."""
        size = min(CACHE_BLOCK, self.kv.keys.shape[-2])
        return (self.num_written + size - 1) // size


def attend(
    queries: Float[Array, "P G N D"], segments: Sequence[Segment], past: Past | None = None
) -> Float[Array, "P G N D"]:
    """Softmax attention of each query over the union of all segments and of the past's blocks.

    Each segment is reduced by itself and the parts are merged by their softmax statistics, which
    equals one softmax over the concatenation. Every query must see at least one key of some
    segment; the result of one that sees none is finite and without meaning. A block that a query
    sees nothing of leaves its result the same to the last bit.
    """
    P, G, N, D = queries.shape
    K = segments[0].kv.keys.shape[2]
    by_key = queries.reshape(P, G, K, N // K, D)
    part = functools.reduce(
        RunningSoftmax.merged, [_attend_segment(by_key, segment) for segment in segments]
    )
    if past is not None:

        def add(number: Int[Array, ""], part: RunningSoftmax) -> RunningSoftmax:
            return _updated(part, by_key, past.block(number, queries.dtype))

        part = jax.lax.fori_loop(0, past.num_blocks(), add, part)
    return part.attended(queries.dtype).reshape(P, G, N, D)


def _attend_segment(queries: Float[Array, "P G K r D"], segment: Segment) -> RunningSoftmax:
    P, G, K, repeats, D = queries.shape
    if segment.kv.keys.shape[1] == G:
        return _updated(RunningSoftmax.over_nothing(queries), queries, segment)
    # A shared segment sees its group as one long run of queries: one larger product per prompt.
    run = queries.swapaxes(1, 2).reshape(P, 1, K, G * repeats, D)
    part = _updated(RunningSoftmax.over_nothing(run), run, segment)
    return RunningSoftmax(*(x.reshape(P, K, G, repeats, -1).swapaxes(1, 2) for x in part))


def _updated(
    part: RunningSoftmax, queries: Float[Array, "P J K r D"], segment: Segment
) -> RunningSoftmax:
    """Attention over a segment more, of which each of `J` rows has its own."""
    scores = product("pjkrd,pjksd->pjkrs", queries, segment.kv.keys) * queries.shape[-1] ** -0.5
    visible = segment.visible[:, :, None, None]
    return part.updated(jnp.where(visible, scores, MASKED), segment.kv.values, "pjkrs,pjksd->pjkrd")
