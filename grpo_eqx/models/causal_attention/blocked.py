"""Attention over whole sequences in blocks, forward and backward.

FlashAttention-2 (arXiv 2307.08691) in plain JAX, for any device: the forward pass keeps a running
softmax over blocks of keys, the backward pass recomputes the weights from its statistics, and
blocks above the diagonal are never computed. So no `T x T` array is ever materialized.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from grpo_eqx.models.causal_attention.base import CausalAttention, Inputs, Masks, Residuals, filled
from grpo_eqx.models.kv_cache import KeyValues
from grpo_eqx.models.running_softmax import MASKED, RunningSoftmax, product
from grpo_eqx.models.tiles import even_tile

Arrays = TypeVar("Arrays")
_Index = Int[Array, ""] | int


class BlockedAttention(CausalAttention):
    """Attention in blocks, in plain JAX, for any device and dtype."""

    block: int = 128
    """Maximum number of positions in a block; by default, the width of matrix units."""

    def attend(self, inputs: Inputs, masks: Masks) -> Float[Array, "P K R r T D"]:
        visible = masks.visible
        if visible is not None:
            visible = visible[:, None, None, None, :, None]
        return _in_blocks(self.block, inputs, _Masks(masks.spans[..., None], visible))


class _Masks(NamedTuple):
    """`Masks` with positions on the axis that blocks are cut from."""

    spans: Int[Array, "#P #R T 1"]
    visible: Bool[Array, "P 1 1 1 S 1"] | None


class _Blocks(NamedTuple):
    """Equal blocks of positions, which are the second-to-last axis of every array."""

    size: int
    number: int

    @classmethod
    def of(cls, length: int, most: int) -> "_Blocks":
        size = even_tile(length, most)
        return cls(size, -(-length // size))

    def number_of_pairs(self) -> int:
        """Returns the number of pairs of a query block and a key block that it sees."""
        return self.number * (self.number + 1) // 2

    def pair(self, number: _Index) -> tuple[_Index, _Index]:
        """Returns the indices of the query block and the key block of pair `number`."""
        if self.number == 1:
            return 0, 0
        i, j = (jnp.asarray(x, jnp.int32)[number] for x in np.tril_indices(self.number))
        return i, j

    def cut(self, tree: Arrays, index: _Index) -> Arrays:
        if self.number == 1:
            return tree

        def cut(x: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(x, index * self.size, self.size, -2)

        return jax.tree.map(cut, tree)

    def put(self, tree: Arrays, block: Arrays, index: _Index) -> Arrays:
        if self.number == 1:
            return block

        def put(x: Array, y: Array) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(x, y, index * self.size, x.ndim - 2)

        return jax.tree.map(put, tree, block)


_OWN, _SHARED = "pkrsd", "pksd"


def _own_scores(
    inputs: Inputs, masks: _Masks, blocks: _Blocks, i: _Index, j: _Index
) -> Float[Array, "P K R r B B"]:
    """Computes masked scores of a block of queries with a block of their rows' keys."""
    q, k = blocks.cut(inputs.queries, i), blocks.cut(inputs.own.keys, j)
    offsets = jnp.arange(blocks.size)
    before = (i * blocks.size + offsets)[:, None] >= j * blocks.size + offsets
    same = blocks.cut(masks.spans, i) == blocks.cut(masks.spans, j).swapaxes(2, 3)
    seen = (before & same)[:, None, :, None]
    scores = product(f"pkrgtd,{_OWN}->pkrgts", q, k) * q.shape[-1] ** -0.5
    return jnp.where(seen, scores, MASKED)


def _shared_scores(
    inputs: Inputs, masks: _Masks, blocks: _Blocks, j: _Index
) -> Float[Array, "P K R r T B"]:
    """Computes masked scores of all queries with a block of their prompts' keys."""
    assert inputs.shared is not None
    assert masks.visible is not None
    q, k = inputs.queries, blocks.cut(inputs.shared.keys, j)
    seen = blocks.cut(masks.visible, j).swapaxes(-1, -2)
    scores = product(f"pkrgtd,{_SHARED}->pkrgts", q, k) * q.shape[-1] ** -0.5
    return jnp.where(seen, scores, MASKED)


def _in_blocks(most: int, inputs: Inputs, masks: _Masks) -> Float[Array, "P K R r T D"]:
    """Computes attention in blocks of at most `most` positions."""
    T = inputs.queries.shape[-2]

    def pad(x: Array, fill: int = 0) -> Array:
        return filled(x, -2, _Blocks.of(x.shape[-2], most).size, fill)

    inputs = jax.tree.map(pad, inputs)
    # Padding in rows sees other padding, and nothing sees padding in prompts.
    masks = _Masks(pad(masks.spans, fill=-2), jax.tree.map(pad, masks.visible))
    return _attention(most, inputs, masks)[..., :T, :]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(most: int, inputs: Inputs, masks: _Masks) -> Float[Array, "P K R r T D"]:
    return _forward(most, inputs, masks)[0]


def _forward(
    most: int, inputs: Inputs, masks: _Masks
) -> tuple[Float[Array, "P K R r T D"], Residuals]:
    part = RunningSoftmax.over_nothing(inputs.queries)
    if (shared := inputs.shared) is not None:
        prompt = _Blocks.of(shared.keys.shape[-2], most)

        def add_shared(j: _Index, part: RunningSoftmax) -> RunningSoftmax:
            scores = _shared_scores(inputs, masks, prompt, j)
            return part.updated(scores, prompt.cut(shared.values, j), f"pkrgts,{_SHARED}->pkrgtd")

        part = _loop(prompt.number, add_shared, part)
    rows = _Blocks.of(inputs.queries.shape[-2], most)

    def add_own(pair: _Index, part: RunningSoftmax) -> RunningSoftmax:
        i, j = rows.pair(pair)
        scores, values = _own_scores(inputs, masks, rows, i, j), rows.cut(inputs.own.values, j)
        return rows.put(
            part, rows.cut(part, i).updated(scores, values, f"pkrgts,{_OWN}->pkrgtd"), i
        )

    part = _loop(rows.number_of_pairs(), add_own, part)
    attended = part.attended(inputs.queries.dtype)
    return attended, Residuals(inputs, masks, attended, part.logsumexp()[..., 0])


class _Queries(NamedTuple):
    """Queries, with the values that the backward pass needs for them."""

    queries: Float[Array, "P K R r T D"]
    slope: Float[Array, "P K R r T D"]
    """Gradient with respect to the queries' results."""
    logsumexp: Float[Array, "P K R r T 1"]
    inner: Float[Array, "P K R r T 1"]
    """Inner products of slopes and results, which a softmax's gradient subtracts."""

    def gradients(
        self, scores: Float[Array, "P K R r T S"], kv: KeyValues, keys_dims: str
    ) -> tuple[Float[Array, "P K R r T D"], KeyValues]:
        """Computes a block's contributions to the gradients of queries, keys and values."""
        dtype, scale = self.queries.dtype, self.queries.shape[-1] ** -0.5
        weights = jnp.exp(scores - self.logsumexp)
        by_weights = product(f"pkrgtd,{keys_dims}->pkrgts", self.slope, kv.values)
        by_scores = (weights * (by_weights - self.inner) * scale).astype(dtype)
        by_queries = product(f"pkrgts,{keys_dims}->pkrgtd", by_scores, kv.keys)
        by_keys = product(f"pkrgts,pkrgtd->{keys_dims}", by_scores, self.queries)
        by_values = product(f"pkrgts,pkrgtd->{keys_dims}", weights.astype(dtype), self.slope)
        return by_queries, KeyValues(by_keys, by_values)


def _attention_backward(
    most: int, residuals: Residuals, slope: Float[Array, "P K R r T D"]
) -> tuple[Inputs, None]:
    inputs, masks, _, logsumexp = residuals
    inner = residuals.inner(slope)
    queries = _Queries(inputs.queries, slope, logsumexp[..., None], inner[..., None])
    by_queries, by_shared = jnp.zeros(slope.shape, jnp.float32), None
    if (shared := inputs.shared) is not None:
        by_queries, by_shared = _backward_shared(most, inputs, masks, queries, shared)
    by_queries, by_own = _backward_own(most, inputs, masks, queries, by_queries)
    gradients = Inputs(by_queries, by_own, by_shared)
    return jax.tree.map(lambda g, x: g.astype(x.dtype), gradients, inputs), None


def _backward_shared(
    most: int, inputs: Inputs, masks: _Masks, queries: _Queries, shared: KeyValues
) -> tuple[Float[Array, "P K R r T D"], KeyValues]:
    blocks = _Blocks.of(shared.keys.shape[-2], most)

    def add(
        j: _Index, sums: tuple[Float[Array, "P K R r T D"], KeyValues]
    ) -> tuple[Float[Array, "P K R r T D"], KeyValues]:
        by_queries, by_kv = sums
        scores = _shared_scores(inputs, masks, blocks, j)
        more, of_block = queries.gradients(scores, blocks.cut(shared, j), _SHARED)
        return by_queries + more, blocks.put(by_kv, of_block, j)

    zeros = jnp.zeros(inputs.queries.shape, jnp.float32)
    return _loop(blocks.number, add, (zeros, _zeros(shared)))


def _backward_own(
    most: int,
    inputs: Inputs,
    masks: _Masks,
    queries: _Queries,
    by_queries: Float[Array, "P K R r T D"],
) -> tuple[Float[Array, "P K R r T D"], KeyValues]:
    blocks = _Blocks.of(inputs.queries.shape[-2], most)

    def add(
        pair: _Index, sums: tuple[Float[Array, "P K R r T D"], KeyValues]
    ) -> tuple[Float[Array, "P K R r T D"], KeyValues]:
        (by_queries, by_kv), (i, j) = sums, blocks.pair(pair)
        scores = _own_scores(inputs, masks, blocks, i, j)
        of_pair = blocks.cut(queries, i).gradients(scores, blocks.cut(inputs.own, j), _OWN)
        sums = blocks.cut(by_queries, i), blocks.cut(by_kv, j)
        more_queries, more_kv = jax.tree.map(jnp.add, sums, of_pair)
        return blocks.put(by_queries, more_queries, i), blocks.put(by_kv, more_kv, j)

    return _loop(blocks.number_of_pairs(), add, (by_queries, _zeros(inputs.own)))


def _loop(number: int, body: Callable[[_Index, Arrays], Arrays], start: Arrays) -> Arrays:
    """Runs a `fori_loop`, or for a single step the body alone, which compiles faster."""
    return body(0, start) if number == 1 else jax.lax.fori_loop(0, number, body, start)


def _zeros(kv: KeyValues) -> KeyValues:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), kv)


_attention.defvjp(_forward, _attention_backward)
