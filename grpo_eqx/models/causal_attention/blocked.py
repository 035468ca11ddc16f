"""Attention over whole sequences in blocks, forward and backward.

FlashAttention-2 (arXiv 2307.08691) in plain JAX, for any device: for each block of queries, the
forward pass keeps a running softmax over blocks of keys, the backward pass recomputes the weights
from its statistics, and blocks in which no query sees a key are never computed. So no `T x T` array
is ever materialized.
"""

import functools
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from grpo_eqx.models.causal_attention.base import (
    CausalAttention,
    Inputs,
    Residuals,
    Visible,
)
from grpo_eqx.models.product import product
from grpo_eqx.models.running_softmax import MASKED, RunningSoftmax
from grpo_eqx.models.softcap import gradient_before_cap, soft_capped
from grpo_eqx.models.tiles import even_tile, filled

Arrays = TypeVar("Arrays")
_VECTOR = 16
"""Float32 numbers in a CPU's widest vectors."""
_Index = Int[Array, ""] | int


class BlockedAttention(CausalAttention):
    """Attention in blocks, in plain JAX, for any device and dtype."""

    block: int = 128
    """Maximum number of positions in a block; by default, the width of matrix units."""

    def attend(
        self, inputs: Inputs, visible: Visible, softcap: float | None
    ) -> Float[Array, "R K r T D"]:
        T = inputs.queries.shape[-2]
        # CPUs run what a loop leaves beyond whole vectors one number at a time.
        size = min(self.block, even_tile(T, self.block, _VECTOR))
        if size > T:
            inputs = jax.tree.map(lambda x: filled(x, -2, size), inputs)
            visible = visible.filled(size)
        return _attention(size, softcap, inputs, visible)[..., :T, :]


class _Block(NamedTuple):
    """Block of positions, which are the second-to-last axis of every array.

    Slices have one size: that of a smaller block also holds positions of its neighbors.
    """

    size: int
    first: Int[Array, ""]
    """First position of the slice."""
    start: Int[Array, ""]
    end: Int[Array, ""]

    @property
    def positions(self) -> Int[Array, " B"]:
        return self.first + jnp.arange(self.size, dtype=jnp.int32)

    @property
    def holds(self) -> Bool[Array, " B"]:
        """Whether each position of the slice is the block's own."""
        return (self.positions >= self.start) & (self.positions < self.end)

    def cut(self, tree: Arrays) -> Arrays:
        return jax.tree.map(
            lambda x: jax.lax.dynamic_slice_in_dim(x, self.first, self.size, x.ndim - 2), tree
        )

    def put(self, tree: Arrays, block: Arrays) -> Arrays:
        return jax.tree.map(
            lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, self.first, x.ndim - 2),
            tree,
            block,
        )

    def put_own(self, tree: Arrays, block: Arrays) -> Arrays:
        """Puts the block's own positions, and leaves its neighbors as they are."""
        own = self.holds[:, None]
        return self.put(
            tree, jax.tree.map(lambda x, y: jnp.where(own, y, x), self.cut(tree), block)
        )


class _Blocks(NamedTuple):
    """Blocks that all rows are cut into, and the pairs of which any query of any row sees a key."""

    size: int
    """Most positions of a block."""
    length: int
    """Positions of a row."""
    start: Int[Array, " n"]
    """First positions, or `length` where no block is left."""
    end: Int[Array, " n"]
    keys: Int[Array, " pairs"]
    """Blocks of keys, in the order of the blocks of queries that see any of them."""
    first_pair: Int[Array, " n+1"]
    """Index of each block of queries' first pair, and the number of pairs."""

    @classmethod
    def of(cls, visible: Visible, size: int) -> "_Blocks":
        start, end = _cut_at_sequences(visible, size)
        positions = start[:, None] + jnp.arange(size, dtype=jnp.int32)
        seen = visible.sees(start, end).any(axis=0).at[positions].get(mode="fill", fill_value=False)
        pairs = (seen & (positions < end[:, None])[..., None]).any(axis=1)
        _, keys = jnp.nonzero(pairs, size=len(pairs) * (len(pairs) + 1) // 2, fill_value=0)
        first_pair = jnp.append(0, jnp.cumsum(pairs.sum(axis=1)))
        return cls(size, visible.own_start.shape[1], start, end, keys, first_pair)

    @property
    def number(self) -> Int[Array, ""]:
        return jnp.sum(self.start < self.length)

    def pairs(self, index: _Index) -> tuple[Int[Array, ""], Int[Array, ""]]:
        """Returns the first pair of a block of queries, and the end of its pairs."""
        return self.first_pair[index], self.first_pair[index + 1]

    def at(self, index: _Index) -> _Block:
        start = self.start[index]
        first = jnp.minimum(start, self.length - self.size)
        return _Block(self.size, first, start, self.end[index])


def _cut_at_sequences(visible: Visible, size: int) -> tuple[Int[Array, " n"], Int[Array, " n"]]:
    """Returns starts and ends of blocks of at most `size` positions.

    A block ends early where a sequence begins in half of the rows, if it is then at least half
    full: a block with the end of one sequence and the start of the next sees the keys of both.
    """
    T = visible.own_start.shape[1]
    if size >= T:
        return jnp.zeros(1, jnp.int32), jnp.full(1, T, jnp.int32)
    positions = jnp.arange(T + 1, dtype=jnp.int32)
    begins = jnp.mean(visible.own_start == positions[:T], axis=0) >= 0.5
    last_begin = jax.lax.cummax(jnp.append(jnp.where(begins, positions[:T], 0), T))
    full = jnp.minimum(positions + size, T)
    half = size - size // 2
    end = jnp.where(last_begin[full] >= positions + half, last_begin[full], full)
    _, start = jax.lax.scan(lambda at, _: (end[at], at), jnp.int32(0), length=-(-T // half))
    return start, end[start]


class BlockCounts(NamedTuple):
    """Trips of the loops over blocks in a pass."""

    queries: Int[Array, "*calls"]
    """Blocks of queries."""
    pairs: Int[Array, "*calls"]
    """Pairs of a block of queries and a block of keys."""

    @classmethod
    def of(cls, visible: Visible, size: int) -> "BlockCounts":
        """Counts those over rows in which blocks have at most `size` positions."""
        blocks = _Blocks.of(visible, size)
        return cls(blocks.number, blocks.first_pair[-1])


class _Queries(NamedTuple):
    """Block of queries, with what each of them sees."""

    block: _Block
    queries: Float[Array, "R K r B D"]
    visible: Visible

    @classmethod
    def at(cls, block: _Block, inputs: Inputs, visible: Visible) -> "_Queries":
        fields = block.cut(tuple(x[..., None] for x in visible))
        return cls(block, block.cut(inputs.queries), Visible(*fields))

    def scores(
        self, keys: Float[Array, "R K B D"], of_keys: _Block, softcap: float | None
    ) -> Float[Array, "R K r B B"]:
        """Computes capped and masked scores with a block of keys."""
        seen = self.visible.shows(self.block.positions[:, None], of_keys.positions)
        seen &= self.block.holds[:, None] & of_keys.holds
        scores = product("rkgtd,rksd->rkgts", self.queries, keys) * self.queries.shape[-1] ** -0.5
        return jnp.where(seen[:, None, None], soft_capped(scores, softcap), MASKED)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(
    size: int, softcap: float | None, inputs: Inputs, visible: Visible
) -> Float[Array, "R K r T D"]:
    return _forward(size, softcap, inputs, visible)[0]


def _forward(
    size: int, softcap: float | None, inputs: Inputs, visible: Visible
) -> tuple[Float[Array, "R K r T D"], Residuals]:
    blocks = _Blocks.of(visible, size)
    Results = tuple[Float[Array, "R K r T D"], Float[Array, "R K r T 1"]]

    def add_block(number: _Index, results: Results) -> Results:
        block = blocks.at(number)
        queries = _Queries.at(block, inputs, visible)

        def add_pair(pair: _Index, part: RunningSoftmax) -> RunningSoftmax:
            of_keys = blocks.at(blocks.keys[pair])
            keys, values = of_keys.cut((inputs.keys, inputs.values))
            scores = queries.scores(keys, of_keys, softcap)
            return part.updated(scores, values, "rkgts,rksd->rkgtd")

        nothing = RunningSoftmax.over_nothing(queries.queries)
        part = jax.lax.fori_loop(*blocks.pairs(number), add_pair, nothing)
        return block.put_own(results, (part.attended(inputs.queries.dtype), part.logsumexp()))

    start = jnp.zeros_like(inputs.queries), jnp.zeros((*inputs.queries.shape[:-1], 1), jnp.float32)
    attended, logsumexp = jax.lax.fori_loop(0, blocks.number, add_block, start)
    return attended, Residuals(inputs, visible, attended, logsumexp[..., 0])


class _Slopes(NamedTuple):
    """Values per query that the backward pass needs besides the queries."""

    slope: Float[Array, "R K r T D"]
    """Gradient with respect to the queries' results."""
    logsumexp: Float[Array, "R K r T 1"]
    inner: Float[Array, "R K r T 1"]
    """Inner products of slopes and results, which a softmax's gradient subtracts."""

    def weights(
        self,
        scores: Float[Array, "R K r B B"],
        values: Float[Array, "R K B D"],
        softcap: float | None,
        scale: float,
    ) -> tuple[Float[Array, "R K r B B"], Float[Array, "R K r B B"]]:
        """Computes the weights of keys, and the gradient with respect to products with them."""
        weights = jnp.exp(scores - self.logsumexp)
        by_weights = product("rkgtd,rksd->rkgts", self.slope, values)
        by_scores = weights * (by_weights - self.inner) * scale
        return weights, gradient_before_cap(by_scores, scores, softcap)


def _backward(
    size: int,
    softcap: float | None,
    residuals: Residuals,
    slope: Float[Array, "R K r T D"],
) -> tuple[Inputs, None]:
    inputs, visible, _, logsumexp = residuals
    dtype, scale = inputs.queries.dtype, inputs.queries.shape[-1] ** -0.5
    blocks = _Blocks.of(visible, size)
    slopes = _Slopes(slope, logsumexp[..., None], residuals.inner(slope)[..., None])

    def add_block(number: _Index, gradients: Inputs) -> Inputs:
        block = blocks.at(number)
        queries, of_block = _Queries.at(block, inputs, visible), block.cut(slopes)
        # Transposed once: XLA's CPU compiler copies the left operand to transpose it.
        columns = jax.lax.optimization_barrier(
            (_columns(queries.queries), _columns(of_block.slope)),
        )

        def add_pair(pair: _Index, sums: Inputs) -> Inputs:
            of_keys = blocks.at(blocks.keys[pair])
            keys, values = of_keys.cut((inputs.keys, inputs.values))
            scores = queries.scores(keys, of_keys, softcap)
            weights, by_scores = of_block.weights(scores, values, softcap, scale)
            rows = [x.astype(dtype).reshape(*x.shape[:2], -1, size) for x in (by_scores, weights)]
            # Without the barrier, the compiler swaps the operands back.
            more = jax.lax.optimization_barrier(
                tuple(product("rkdm,rkms->rkds", x, y) for x, y in zip(columns, rows, strict=True))
            )
            before = sums.keys, sums.values
            after = jax.tree.map(lambda x, y: x + y.swapaxes(-1, -2), of_keys.cut(before), more)
            by_queries = product("rkgts,rksd->rkgtd", by_scores.astype(dtype), keys)
            return Inputs(sums.queries + by_queries, *of_keys.put(before, after))

        nothing = jnp.zeros(queries.queries.shape, jnp.float32)
        sums = jax.lax.fori_loop(
            *blocks.pairs(number), add_pair, gradients._replace(queries=nothing)
        )
        return sums._replace(queries=block.put_own(gradients.queries, sums.queries))

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), inputs)
    gradients = jax.lax.fori_loop(0, blocks.number, add_block, zeros)
    return jax.tree.map(lambda g, x: g.astype(x.dtype), gradients, inputs), None


def _columns(x: Float[Array, "R K r B D"]) -> Float[Array, "R K D r*B"]:
    R, K, _, _, D = x.shape
    return x.reshape(R, K, -1, D).swapaxes(-1, -2)


_attention.defvjp(_forward, _backward)
