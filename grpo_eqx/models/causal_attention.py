"""Attention of whole sequences in blocks, forward and backward.

FlashAttention-2 (arXiv 2307.08691) in plain JAX, for any device: the forward pass keeps a running
softmax over blocks of keys, the backward pass computes the weights again from its statistics, and
blocks above the diagonal are never computed. So no array of `T x T` numbers exists.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from grpo_eqx.models.attention import MASKED, KeyValues, Segment

BLOCK = 128
"""Places of a block, at most; as wide as matrix units are."""
CPU_BLOCK = 64
"""What a core's cache holds well: 128 took up to 1.8 times as long, 256 up to 3 times."""

Arrays = TypeVar("Arrays")
_Index = Int[Array, ""] | int


def causal_attention(
    queries: Float[Array, "P R T N D"],
    own: KeyValues,
    shared: Segment | None = None,
    spans: Int[Array, "#P #R T"] | None = None,
    block: int = BLOCK,
) -> Float[Array, "P R T N D"]:
    """Softmax attention of each query over its row up to itself, and over its prompt.

    **Arguments:** queries of `R` rows for each of `P` prompts; keys and values of the rows,
    `[P, R, K, T, D]`; those of the prompts, `[P, 1, K, S, D]`, with a mask `[P, 1, 1, S]`; which
    sequence each place of a row belongs to, where a query is to see no other's (`None`: a row is
    one sequence); how many places a block has at most.
    """
    P, R, T, N, D = queries.shape
    K = own.keys.shape[2]
    if spans is None:
        spans = jnp.zeros((1, 1, T), jnp.int32)
    visible = None if shared is None else shared.visible.swapaxes(2, 3)[:, :, None, None]
    inputs = _Inputs(
        queries=queries.reshape(P, R, T, K, N // K, D).transpose(0, 3, 1, 4, 2, 5),
        own=KeyValues(*(x.swapaxes(1, 2) for x in own)),
        shared=None if shared is None else KeyValues(*(x[:, 0] for x in shared.kv)),
    )
    attended = _in_blocks(block, inputs, _Masks(spans[..., None], visible))
    return attended.transpose(0, 2, 4, 1, 3, 5).reshape(P, R, T, N, D)


class _Inputs(NamedTuple):
    """The arguments; each of the `K` heads of keys has the `r` heads of queries that read it."""

    queries: Float[Array, "P K R r T D"]
    own: KeyValues
    """`[P, K, R, T, D]`."""
    shared: KeyValues | None
    """`[P, K, S, D]`."""


class _Masks(NamedTuple):
    spans: Int[Array, "#P #R T 1"]
    """Which sequence a place of a row belongs to."""
    visible: Bool[Array, "P 1 1 1 S 1"] | None
    """Which places of the prompts all queries see."""


class _Softmax(NamedTuple):
    """Attention over the keys so far, before normalisation, float32."""

    weighted: Float[Array, "P K R r T D"]
    total: Float[Array, "P K R r T 1"]
    highest: Float[Array, "P K R r T 1"]

    @classmethod
    def over_nothing(cls, queries: Float[Array, "P K R r T D"]) -> "_Softmax":
        zeros = jnp.zeros(queries.shape, jnp.float32)
        return cls(zeros, zeros[..., :1], jnp.full_like(zeros[..., :1], MASKED))

    def updated(
        self, scores: Float[Array, "P K R r T S"], values: Array, keys_dims: str
    ) -> "_Softmax":
        """Over a block more."""
        highest = jnp.maximum(self.highest, scores.max(axis=-1, keepdims=True))
        weights = jnp.exp(scores - highest)
        decay = jnp.exp(self.highest - highest)
        weighted = _product(f"pkrgts,{keys_dims}->pkrgtd", weights.astype(values.dtype), values)
        total = weights.sum(axis=-1, keepdims=True)
        return _Softmax(self.weighted * decay + weighted, self.total * decay + total, highest)


class _Blocks(NamedTuple):
    """How the places of sequences, the last axis but one of every array, are cut."""

    size: int
    number: int

    @classmethod
    def of(cls, length: int, most: int) -> "_Blocks":
        number = -(-length // most)
        return cls(-(-length // number), number)

    def number_of_pairs(self) -> int:
        """Of a block of queries and one of keys that these see."""
        return self.number * (self.number + 1) // 2

    def pair(self, number: _Index) -> tuple[_Index, _Index]:
        """The pair of that number."""
        if self.number == 1:
            return 0, 0
        pairs = [(i, j) for i in range(self.number) for j in range(i + 1)]
        i, j = jnp.asarray(pairs, jnp.int32)[number]
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


def _product(dims: str, x: Array, y: Array) -> Array:
    return jnp.einsum(dims, x, y, preferred_element_type=jnp.float32)


def _own_scores(
    inputs: _Inputs, masks: _Masks, blocks: _Blocks, i: _Index, j: _Index
) -> Float[Array, "P K R r B B"]:
    """Of a block of queries with a block of their rows' keys."""
    q, k = blocks.cut(inputs.queries, i), blocks.cut(inputs.own.keys, j)
    place = jnp.arange(blocks.size)
    before = (i * blocks.size + place)[:, None] >= j * blocks.size + place
    same = blocks.cut(masks.spans, i) == blocks.cut(masks.spans, j).swapaxes(2, 3)
    seen = (before & same)[:, None, :, None]
    scores = _product(f"pkrgtd,{_OWN}->pkrgts", q, k) * q.shape[-1] ** -0.5
    return jnp.where(seen, scores, MASKED)


def _shared_scores(
    inputs: _Inputs, masks: _Masks, blocks: _Blocks, j: _Index
) -> Float[Array, "P K R r T B"]:
    """Of all queries with a block of their prompts' keys."""
    assert inputs.shared is not None
    assert masks.visible is not None
    q, k = inputs.queries, blocks.cut(inputs.shared.keys, j)
    seen = blocks.cut(masks.visible, j).swapaxes(-1, -2)
    scores = _product(f"pkrgtd,{_SHARED}->pkrgts", q, k) * q.shape[-1] ** -0.5
    return jnp.where(seen, scores, MASKED)


def _in_blocks(most: int, inputs: _Inputs, masks: _Masks) -> Float[Array, "P K R r T D"]:
    """Attention in blocks of at most that many places."""
    T = inputs.queries.shape[-2]

    def pad(x: Array, fill: int = 0) -> Array:
        blocks = _Blocks.of(x.shape[-2], most)
        more = blocks.size * blocks.number - x.shape[-2]
        return jnp.pad(x, ((0, 0),) * (x.ndim - 2) + ((0, more), (0, 0)), constant_values=fill)

    inputs = jax.tree.map(pad, inputs)
    # New places of rows see each other, and nobody sees those of prompts.
    masks = _Masks(pad(masks.spans, fill=-2), jax.tree.map(pad, masks.visible))
    return _attention(most, inputs, masks)[..., :T, :]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(most: int, inputs: _Inputs, masks: _Masks) -> Float[Array, "P K R r T D"]:
    return _forward(most, inputs, masks)[0]


def _forward(
    most: int, inputs: _Inputs, masks: _Masks
) -> tuple[Float[Array, "P K R r T D"], Float[Array, "P K R r T 1"]]:
    """The attention, and the logarithm of each query's sum of exponentials."""
    part = _Softmax.over_nothing(inputs.queries)
    if (shared := inputs.shared) is not None:
        prompt = _Blocks.of(shared.keys.shape[-2], most)

        def add_shared(j: _Index, part: _Softmax) -> _Softmax:
            scores = _shared_scores(inputs, masks, prompt, j)
            return part.updated(scores, prompt.cut(shared.values, j), _SHARED)

        part = _loop(prompt.number, add_shared, part)
    rows = _Blocks.of(inputs.queries.shape[-2], most)

    def add_own(pair: _Index, part: _Softmax) -> _Softmax:
        i, j = rows.pair(pair)
        scores, values = _own_scores(inputs, masks, rows, i, j), rows.cut(inputs.own.values, j)
        return rows.put(part, rows.cut(part, i).updated(scores, values, _OWN), i)

    part = _loop(rows.number_of_pairs(), add_own, part)
    attended = (part.weighted / part.total).astype(inputs.queries.dtype)
    return attended, part.highest + jnp.log(part.total)


class _Residuals(NamedTuple):
    inputs: _Inputs
    masks: _Masks
    attended: Float[Array, "P K R r T D"]
    logsumexp: Float[Array, "P K R r T 1"]


def _attention_forward(
    most: int, inputs: _Inputs, masks: _Masks
) -> tuple[Float[Array, "P K R r T D"], _Residuals]:
    attended, logsumexp = _forward(most, inputs, masks)
    return attended, _Residuals(inputs, masks, attended, logsumexp)


class _Queries(NamedTuple):
    """Queries with what the backward pass knows of them."""

    queries: Float[Array, "P K R r T D"]
    slope: Float[Array, "P K R r T D"]
    """The gradient by what they attended to."""
    logsumexp: Float[Array, "P K R r T 1"]
    inner: Float[Array, "P K R r T 1"]
    """Inner products of slopes and results: what a softmax's gradient subtracts."""

    def gradients(
        self, scores: Float[Array, "P K R r T S"], kv: KeyValues, keys_dims: str
    ) -> tuple[Float[Array, "P K R r T D"], KeyValues]:
        """A block's part in the gradient of the queries, and those of its keys and values."""
        dtype, scale = self.queries.dtype, self.queries.shape[-1] ** -0.5
        weights = jnp.exp(scores - self.logsumexp)
        by_weights = _product(f"pkrgtd,{keys_dims}->pkrgts", self.slope, kv.values)
        by_scores = (weights * (by_weights - self.inner) * scale).astype(dtype)
        by_queries = _product(f"pkrgts,{keys_dims}->pkrgtd", by_scores, kv.keys)
        by_keys = _product(f"pkrgts,pkrgtd->{keys_dims}", by_scores, self.queries)
        by_values = _product(f"pkrgts,pkrgtd->{keys_dims}", weights.astype(dtype), self.slope)
        return by_queries, KeyValues(by_keys, by_values)


def _attention_backward(
    most: int, residuals: _Residuals, slope: Float[Array, "P K R r T D"]
) -> tuple[_Inputs, None]:
    inputs, masks, attended, logsumexp = residuals
    both = attended.astype(jnp.float32) * slope.astype(jnp.float32)
    queries = _Queries(inputs.queries, slope, logsumexp, both.sum(axis=-1, keepdims=True))
    by_queries, by_shared = jnp.zeros(slope.shape, jnp.float32), None
    if (shared := inputs.shared) is not None:
        by_queries, by_shared = _backward_shared(most, inputs, masks, queries, shared)
    by_queries, by_own = _backward_own(most, inputs, masks, queries, by_queries)
    gradients = _Inputs(by_queries, by_own, by_shared)
    return jax.tree.map(lambda g, x: g.astype(x.dtype), gradients, inputs), None


def _backward_shared(
    most: int, inputs: _Inputs, masks: _Masks, queries: _Queries, shared: KeyValues
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
    inputs: _Inputs,
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
    """`fori_loop`, or the body alone, which compiles faster."""
    return body(0, start) if number == 1 else jax.lax.fori_loop(0, number, body, start)


def _zeros(kv: KeyValues) -> KeyValues:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), kv)


_attention.defvjp(_attention_forward, _attention_backward)
