"""Attention of one position at a time, over segments of keys and values.

Queries have shape `[P, G, ...]`: `P` prompts with `G` continuations each. Attention over several
*segments* is merged exactly, so that a group's prompt is stored and read once, not once per
continuation.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

from grpo_eqx.models.kv_cache import CACHE_BLOCK, KeyValues, KVCache, positions_read
from grpo_eqx.models.running_softmax import MASKED, RunningSoftmax, product


class Segment(NamedTuple):
    """Run of keys and values, with a broadcastable mask of those that each row's queries see."""

    kv: KeyValues
    visible: Bool[Array, "#P #J S"]


class Past(NamedTuple):
    """One layer of a growing cache: each query sees the keys before its own position."""

    kv: KVCache
    """Cache of all layers, in whole blocks of `CACHE_BLOCK`, or one shorter block."""
    layer: Int[Array, ""]
    position: Int[Array, "P G"]
    num_written: Int[Array, ""]
    """Blocks from this position on are not read; no live query has a larger `position`."""

    def block(self, number: Int[Array, ""], dtype: jnp.dtype) -> Segment:
        """Returns the segment of one block, in `dtype`."""
        size = min(CACHE_BLOCK, self.kv.keys.shape[-2])
        first = number * size

        def cut(x: Num[Array, "L P G K S D"]) -> Num[Array, "P G K B D"]:
            _, P, G, K, _, D = x.shape
            # All of one dtype, even where JAX's integers have 64 bits.
            start = [jnp.asarray(i, jnp.int32) for i in (self.layer, 0, 0, 0, first, 0)]
            return jax.lax.dynamic_slice(x, start, (1, P, G, K, size, D))[0]

        visible = first + jnp.arange(size) < self.position[..., None]
        return Segment(jax.tree.map(cut, self.kv).loaded(dtype), visible)

    def num_blocks(self) -> Int[Array, ""]:
        """Returns the number of blocks that hold anything."""
        length = self.kv.keys.shape[-2]
        return positions_read(self.num_written, length) // min(CACHE_BLOCK, length)


def attend(
    queries: Float[Array, "P G N D"], segments: Sequence[Segment], past: Past | None = None
) -> Float[Array, "P G N D"]:
    """Computes softmax attention of each query over all segments and the blocks of the past.

    Segments are reduced separately and merged by their softmax statistics, which equals one
    softmax over the concatenation. Every query must see at least one key of some segment; the
    result of one that sees none is finite but meaningless. A block of which a query sees nothing
    leaves its result bitwise unchanged.
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
    # A shared segment treats its group as one long run of queries: one larger product per prompt.
    run = queries.swapaxes(1, 2).reshape(P, 1, K, G * repeats, D)
    part = _updated(RunningSoftmax.over_nothing(run), run, segment)
    return RunningSoftmax(*(x.reshape(P, K, G, repeats, -1).swapaxes(1, 2) for x in part))


def _updated(
    part: RunningSoftmax, queries: Float[Array, "P J K r D"], segment: Segment
) -> RunningSoftmax:
    """Adds a segment, in which each of the `J` rows has its own keys and values."""
    scores = product("pjkrd,pjksd->pjkrs", queries, segment.kv.keys) * queries.shape[-1] ** -0.5
    visible = segment.visible[:, :, None, None]
    return part.updated(jnp.where(visible, scores, MASKED), segment.kv.values, "pjkrs,pjksd->pjkrd")
