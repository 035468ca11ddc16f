"""Attention of the next positions of completions, over a prompt and the completions so far.

Queries have shape `[P, G, T, ...]`: `P` prompts with `G` completions each, of which `T` successive
positions are computed at once. Attention over several *segments* is merged exactly, so that a
group's prompt is stored and read once, not once per completion.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

from grpo_eqx.models.kv_cache import (
    CACHE_BLOCK,
    GrowingCache,
    KeyValues,
    KVCache,
    positions_read,
)
from grpo_eqx.models.product import product
from grpo_eqx.models.running_softmax import MASKED, RunningSoftmax
from grpo_eqx.models.softcap import soft_capped
from grpo_eqx.models.tiles import filled
from grpo_eqx.sharding.rollout_layout import RolloutLayout

CACHE_BLOCKS, ROW_BLOCKS = "cache_blocks", "row_blocks"
"""Scopes of the loops over blocks of a growing cache: of all rows together, and row by row."""


class Segment(NamedTuple):
    """Run of keys and values, with a broadcastable mask of those that each query sees."""

    kv: KVCache
    """As attention computes with it (`KVCache.loaded`)."""
    visible: Bool[Array, "#P #G #T S"]


class OwnKeys(NamedTuple):
    """One layer of a growing cache: each query sees the keys up to its own position.

    With a window, those of the last `window` positions, its own included.
    """

    kv: GrowingCache
    """Cache of all layers."""
    layer: Int[Array, ""]
    positions: Int[Array, "P G T"]
    """Positions of the queries."""
    num_written: Int[Array, ""] | Int[Array, "P 1"]
    """Blocks from this position on are not read; it is above every position of a live query. Rows
    of one slot may have their own."""
    new: KeyValues
    """Keys and values of the queries' own positions, `[P, G, K, T, D]`, before rounding."""
    window: Int[Array, ""] | None = None
    """Length of the sliding window; the largest int32 means no limit."""

    def block(self, part: KVCache, start: int, number: Int[Array, ""], dtype: jnp.dtype) -> Segment:
        """Returns the segment of one block of the part that begins at `start`, in `dtype`."""
        size = min(CACHE_BLOCK, part.num_positions)
        first = number * size

        def cut(x: Num[Array, "L P G K _ _"], axis: int) -> Num[Array, "P G K _ _"]:
            corner: list[Array | int] = [self.layer, *[0] * (x.ndim - 1)]
            sizes = [1, *x.shape[1:]]
            corner[axis], sizes[axis] = first, size
            # All of one dtype, even where JAX's integers have 64 bits.
            return jax.lax.dynamic_slice(x, [jnp.asarray(i, jnp.int32) for i in corner], sizes)[0]

        positions, own = start + first + jnp.arange(size), self.positions[..., None]
        # Where the cache is rounded, a query's own key is not: it is a segment of its own.
        visible = positions < own if self.is_rounded(dtype) else positions <= own
        if self.window is not None:
            visible &= positions > own - self.window
        return Segment(part.mapped(cut).loaded(dtype), visible)

    def is_rounded(self, dtype: jnp.dtype) -> bool:
        """Whether the cache holds less than `dtype`, in which attention computes."""
        return self.kv.parts[0].values.dtype != dtype

    def num_blocks(self, part: KVCache, start: int) -> Int[Array, ""]:
        """Returns how many blocks of the part that begins at `start` hold anything."""
        read = positions_read(jnp.max(self.num_written), self.kv.length) - start
        return jnp.clip(read, 0, part.num_positions) // CACHE_BLOCK


def attend(
    queries: Float[Array, "P G T N D"],
    prompt: Segment,
    own: OwnKeys,
    softcap: float | None = None,
    layout: RolloutLayout | None = None,
) -> Float[Array, "P G T N D"]:
    """Computes softmax attention of each query over its prompt and its completion so far.

    Scores have the soft cap, if any (`soft_capped`). What is visible of a prompt may differ by
    query, whether or not completions share its keys.

    Blocks of keys are merged by their softmax statistics, which equals one softmax over all of
    them. A query that sees nothing of a block has the same result without it, to the last bit.

    Queries of heads that the caches hold with zeros after them get the same zeros.

    **Arguments:**

    - `queries`: the queries.
    - `prompt`, `own`: what they see.
    - `softcap`: the soft cap.
    - `layout`: the layout over devices, for rows that are read one by one.
    """
    P, G, T, N, D = queries.shape
    K, scale = prompt.kv.values.shape[2], D**-0.5
    repeats = N // K
    # The queries that read one key head, those of all positions, are one run.
    split = queries.reshape(P, G, T, K, repeats, D).transpose(0, 1, 3, 4, 2, 5)
    by_key = filled(split.reshape(P, G, K, repeats * T, D), -1, prompt.kv.head_size)

    def add(
        part: KVCache, start: int, number: Int[Array, ""], softmax: RunningSoftmax
    ) -> RunningSoftmax:
        by_block = by_key
        if len(own.kv.parts) > 1:
            # In a loop over a single block, nothing depends on its number. The compiler would
            # compute all of it before the loop, whether the block is read or not.
            part, by_block, number = jax.lax.optimization_barrier((part, by_key, number))
        block = own.block(part, start, number, queries.dtype)
        visible = _by_query(block.visible, repeats)
        return _updated(softmax, by_block, block.kv, visible, scale, softcap)

    softmax = _attend_prompt(by_key, prompt, scale, softcap)
    for start, part in own.kv.placed():
        if own.kv.length <= CACHE_BLOCK:
            softmax = add(part, start, jnp.int32(0), softmax)
        elif own.num_written.ndim and part.num_positions > CACHE_BLOCK:
            softmax = _add_rows(softmax, by_key, own, part, start, scale, softcap, layout)
        else:
            num_blocks = own.num_blocks(part, start)
            with jax.named_scope(CACHE_BLOCKS):
                softmax = jax.lax.fori_loop(0, num_blocks, partial(add, part, start), softmax)
    if own.is_rounded(queries.dtype):
        softmax = _with_own(softmax, by_key, own.new, scale, softcap)
    attended = softmax.attended(queries.dtype)[..., :D].reshape(P, G, K, repeats, T, D)
    return attended.transpose(0, 1, 4, 2, 3, 5).reshape(P, G, T, N, D)


def _add_rows(
    softmax: RunningSoftmax,
    queries: Float[Array, "P 1 K r D"],
    own: OwnKeys,
    part: KVCache,
    start: int,
    scale: float,
    softcap: float | None,
    layout: RolloutLayout | None,
) -> RunningSoftmax:
    """Adds the blocks of a part row by row: of each, no more than it has.

    Where lengths differ much, most of what the longest row needs is nothing to the others.
    """
    size = part.blocks_of_row * CACHE_BLOCK

    def of_rows(
        softmax: RunningSoftmax,
        queries: Array,
        part: KVCache,
        layer: Array,
        positions: Array,
        num_written: Array,
        window: Array | None,
    ) -> RunningSoftmax:
        here = jnp.clip(num_written[:, 0] - start, 0, part.num_positions)
        numbers = (here + size - 1) // size
        ends = jnp.cumsum(numbers)

        def add(trip: Int[Array, ""], softmax: RunningSoftmax) -> RunningSoftmax:
            row = jnp.sum(ends <= trip, dtype=jnp.int32)
            first = (trip - ends[row] + numbers[row]) * size

            def cut(x: Array, axis: int) -> Array:
                corner = [layer, row, *[jnp.int32(0)] * (x.ndim - 2)]
                sizes = [1, 1, *x.shape[2:]]
                corner[axis], sizes[axis] = first, size
                return jax.lax.dynamic_slice(x, corner, sizes)[0]

            def of_row(x: Array) -> Array:
                return jax.lax.dynamic_slice_in_dim(x, row, 1)

            keys, own = start + first + jnp.arange(size), of_row(positions)[..., None]
            visible = keys < own if is_rounded else keys <= own
            if window is not None:
                visible &= keys > own - window
            repeats = queries.shape[3] // positions.shape[2]
            before = jax.tree.map(of_row, softmax)
            after = _updated(
                before, of_row(queries), part.mapped(cut).loaded(queries.dtype),
                _by_query(visible, repeats), scale, softcap,
            )  # fmt: skip
            return jax.tree.map(
                lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, new, row, 0), softmax, after
            )

        with jax.named_scope(ROW_BLOCKS):
            return jax.lax.fori_loop(jnp.int32(0), ends[-1], add, softmax)

    is_rounded = own.is_rounded(queries.dtype)
    arguments = (
        softmax, queries, part, own.layer, own.positions, own.num_written, own.window
    )  # fmt: skip
    if layout is None:
        return of_rows(*arguments)
    K = queries.shape[2]
    repeats = queries.shape[3] // own.positions.shape[2]
    slot = layout.prompts, layout.groups
    of_queries = *slot, layout.heads(K), layout.queries(K, repeats)
    of_cache = (), *slot, layout.heads(K)
    in_axes = [of_queries, of_queries, of_cache, (), slot, slot, ()]
    return layout.on_each_device(of_rows, in_axes, of_queries)(*arguments)


def _by_query(visible: Bool[Array, "#P #G #T S"], repeats: int) -> Bool[Array, "#P #G 1 #r S"]:
    """Returns a mask of positions for the run of queries of a key head."""
    if visible.shape[2] > 1:
        visible = jnp.tile(visible, (1, 1, repeats, 1))
    return visible[:, :, None]


def _attend_prompt(
    queries: Float[Array, "P G K r D"], prompt: Segment, scale: float, softcap: float | None
) -> RunningSoftmax:
    P, G, K, run_length, D = queries.shape
    kv, visible = prompt
    if kv.values.shape[1] == G:
        nothing = RunningSoftmax.over_nothing(queries)
        by_query = _by_query(visible, run_length // visible.shape[2])
        return _updated(nothing, queries, kv, by_query, scale, softcap)
    # A group that shares its prompt is one long run of queries: one larger product per prompt.
    # Heads before completions: devices that share heads then have a part of the run each.
    run = queries.transpose(0, 2, 3, 1, 4).reshape(P, 1, K, run_length * G, D)
    if visible.shape[1] > 1:
        by_position = visible.swapaxes(1, 2).reshape(P, 1, -1, visible.shape[-1])
        visible = jnp.tile(by_position, (1, 1, run_length * G // by_position.shape[2], 1))
    nothing = RunningSoftmax.over_nothing(run)
    part = _updated(nothing, run, kv, visible[:, :, None], scale, softcap)
    return RunningSoftmax(
        *(x.reshape(P, K, run_length, G, -1).transpose(0, 3, 1, 2, 4) for x in part)
    )


def _with_own(
    part: RunningSoftmax,
    queries: Float[Array, "P G K r D"],
    new: KeyValues,
    scale: float,
    softcap: float | None,
) -> RunningSoftmax:
    """Adds to each query the key and the value of its own position."""
    repeats = queries.shape[3] // new.keys.shape[3]
    keys, values = (jnp.tile(filled(x, -1, queries.shape[-1]), (1, 1, 1, repeats, 1)) for x in new)
    scores = product("pgkrd,pgkrd->pgkr", queries, keys)[..., None] * scale
    return part.updated(soft_capped(scores, softcap), values[..., None, :], "pgkrs,pgkrsd->pgkrd")


def _updated(
    part: RunningSoftmax,
    queries: Float[Array, "P J K r D"],
    kv: KVCache,
    visible: Bool[Array, "#P #J #K #r S"],
    scale: float,
    softcap: float | None,
) -> RunningSoftmax:
    """Adds keys and values, of which each of the `J` rows has its own."""
    assert kv.key_scales is None, "keys are scaled as they are loaded"
    scores = soft_capped(kv.scores(queries) * scale, softcap)
    scores = jnp.where(visible, scores, MASKED)
    return part.updated(scores, kv.values, "pjkrs,pjksd->pjkrd")
