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
    BlockSizes,
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
QUERY_BLOCKS, BLOCK_PAIRS = "query_blocks", "block_pairs"
"""Scopes of the loops over blocks of queries, and over the pairs of each with blocks of keys."""
_Index = Int[Array, ""] | int


class BlockedAttention(CausalAttention):
    """Attention in blocks, in plain JAX, for any device and dtype."""

    block: int = 128
    """Maximum number of positions in a block; by default, the width of matrix units."""
    per_wide: int = 1
    """Number of neighboring blocks in a wide block. A pair of wide blocks is computed at once where
    every pair of their blocks is needed. With 1, there are no wide blocks."""

    def block_sizes(self, length: int, repeats: int) -> BlockSizes:
        # CPUs run what a loop leaves beyond whole vectors one number at a time.
        size = min(self.block, even_tile(length, self.block, _VECTOR))
        return BlockSizes(size, size, self.per_wide)

    def attend(
        self, inputs: Inputs, visible: Visible, softcap: float | None
    ) -> Float[Array, "R K r T D"]:
        repeats, T = inputs.queries.shape[2:4]
        size = self.block_sizes(T, repeats).queries
        inputs = jax.tree.map(lambda x: filled(x, -2, size), inputs)
        return _attention(size, self.per_wide, softcap, inputs, visible.filled(size))[..., :T, :]


class _Block(NamedTuple):
    """Block of positions, which are the second-to-last axis of every array."""

    size: int
    first: Int[Array, ""]

    @property
    def positions(self) -> Int[Array, " B"]:
        return self.first + jnp.arange(self.size, dtype=jnp.int32)

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


class _Level(NamedTuple):
    """Blocks of one width, and the pairs of them that a pass computes."""

    size: int
    """Number of positions in a block."""
    number: Int[Array, ""]
    """Number of blocks of queries that have pairs."""
    queries: Int[Array, " n"]
    """Blocks of queries that have pairs."""
    keys: Int[Array, " pairs"]
    """Blocks of keys, in the order of the blocks of queries."""
    first_pair: Int[Array, " n+1"]
    """Index of the first pair of each block of queries, then the number of all pairs."""

    @classmethod
    def of(cls, size: int, pairs: Bool[Array, "n n"]) -> "_Level":
        n, have_pairs = len(pairs), pairs.any(axis=1)
        (queries,) = jnp.nonzero(have_pairs, size=n, fill_value=0)
        _, keys = jnp.nonzero(pairs, size=n * (n + 1) // 2, fill_value=0)
        first_pair = jnp.append(0, jnp.cumsum(pairs.sum(axis=1)))
        return cls(size, have_pairs.sum(), queries, keys, first_pair)

    def block(self, index: Int[Array, ""]) -> _Block:
        return _Block(self.size, index * self.size)

    def pairs(self, index: _Index) -> tuple[Int[Array, ""], Int[Array, ""]]:
        """Returns the first pair of a block of queries, and the end of its pairs."""
        return self.first_pair[index], self.first_pair[index + 1]


def _levels(visible: Visible, size: int, per_wide: int) -> list[_Level]:
    """Returns the levels of a pass, which together compute each needed pair once.

    Wide blocks come first, if rows are longer than one of them. Their products are large enough for
    XLA's CPU compiler to share them out among cores.
    """
    pairs = visible.blocks(size, size).any(axis=0)
    n = len(pairs)
    if per_wide == 1 or per_wide >= n:
        return [_Level.of(size, pairs)]
    # The last wide block may have fewer blocks, and then has no pairs.
    m, group = -(-n // per_wide), jnp.arange(n) // per_wide
    in_groups = jnp.pad(pairs, (0, -n % per_wide)).reshape(m, per_wide, m, per_wide)
    whole = in_groups.all(axis=(1, 3))
    others = pairs & ~whole[group[:, None], group]
    return [_Level.of(per_wide * size, whole), _Level.of(size, others)]


class BlockCounts(NamedTuple):
    """Trips of the loops over blocks of one width in a pass."""

    queries: Int[Array, "*calls"]
    """Blocks of queries."""
    pairs: Int[Array, "*calls"]
    """Pairs of a block of queries and a block of keys."""

    @classmethod
    def by_width(cls, visible: Visible, size: int, per_wide: int = 1) -> "list[BlockCounts]":
        """Counts the trips over rows in blocks of `size` positions.

        Wide blocks, of `per_wide` neighbors each, come first, if there are any.
        """
        levels = _levels(visible.filled(size), size, per_wide)
        return [cls(level.number, level.first_pair[-1]) for level in levels]


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
        scores = product("rkgtd,rksd->rkgts", self.queries, keys) * self.queries.shape[-1] ** -0.5
        return jnp.where(seen[:, None, None], soft_capped(scores, softcap), MASKED)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _attention(
    size: int, per_wide: int, softcap: float | None, inputs: Inputs, visible: Visible
) -> Float[Array, "R K r T D"]:
    return _forward(size, per_wide, softcap, inputs, visible)[0]


def _forward(
    size: int, per_wide: int, softcap: float | None, inputs: Inputs, visible: Visible
) -> tuple[Float[Array, "R K r T D"], Residuals]:
    parts = RunningSoftmax.over_nothing(inputs.queries)
    for level in _levels(visible, size, per_wide):
        parts = _with_level(level, softcap, inputs, visible, parts)
    attended, logsumexp = parts.attended(inputs.queries.dtype), parts.logsumexp()
    return attended, Residuals(inputs, visible, attended, logsumexp[..., 0])


def _with_level(
    level: _Level, softcap: float | None, inputs: Inputs, visible: Visible, parts: RunningSoftmax
) -> RunningSoftmax:
    """Merges the pairs of a level into what other levels have added up for all queries."""

    def add_block(index: _Index, parts: RunningSoftmax) -> RunningSoftmax:
        number = level.queries[index]
        block = level.block(number)
        queries = _Queries.at(block, inputs, visible)

        def add_pair(pair: _Index, part: RunningSoftmax) -> RunningSoftmax:
            of_keys = level.block(level.keys[pair])
            keys, values = of_keys.cut((inputs.keys, inputs.values))
            scores = queries.scores(keys, of_keys, softcap)
            return part.updated(scores, values, "rkgts,rksd->rkgtd")

        with jax.named_scope(BLOCK_PAIRS):
            part = jax.lax.fori_loop(*level.pairs(number), add_pair, block.cut(parts))
        return block.put(parts, part)

    with jax.named_scope(QUERY_BLOCKS):
        return jax.lax.fori_loop(0, level.number, add_block, parts)


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
    per_wide: int,
    softcap: float | None,
    residuals: Residuals,
    slope: Float[Array, "R K r T D"],
) -> tuple[Inputs, None]:
    inputs, visible, _, logsumexp = residuals
    slopes = _Slopes(slope, logsumexp[..., None], residuals.inner(slope)[..., None])
    gradients = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), inputs)
    for level in _levels(visible, size, per_wide):
        gradients = _with_gradients(level, softcap, inputs, visible, slopes, gradients)
    return jax.tree.map(lambda g, x: g.astype(x.dtype), gradients, inputs), None


def _with_gradients(
    level: _Level,
    softcap: float | None,
    inputs: Inputs,
    visible: Visible,
    slopes: _Slopes,
    gradients: Inputs,
) -> Inputs:
    """Adds the gradients through the pairs of a level to those so far, in float32."""
    dtype, scale = inputs.queries.dtype, inputs.queries.shape[-1] ** -0.5

    def add_block(index: _Index, gradients: Inputs) -> Inputs:
        number = level.queries[index]
        block = level.block(number)
        queries, of_block = _Queries.at(block, inputs, visible), block.cut(slopes)
        # Transposed once: XLA's CPU compiler copies the left operand to transpose it.
        columns = jax.lax.optimization_barrier(
            (_columns(queries.queries), _columns(of_block.slope)),
        )

        def add_pair(pair: _Index, sums: Inputs) -> Inputs:
            of_keys = level.block(level.keys[pair])
            keys, values = of_keys.cut((inputs.keys, inputs.values))
            scores = queries.scores(keys, of_keys, softcap)
            weights, by_scores = of_block.weights(scores, values, softcap, scale)
            rows = [
                x.astype(dtype).reshape(*x.shape[:2], -1, of_keys.size)
                for x in (by_scores, weights)
            ]
            # Without the barrier, the compiler swaps the operands back.
            more = jax.lax.optimization_barrier(
                tuple(product("rkdm,rkms->rkds", x, y) for x, y in zip(columns, rows, strict=True))
            )
            before = sums.keys, sums.values
            after = jax.tree.map(lambda x, y: x + y.swapaxes(-1, -2), of_keys.cut(before), more)
            by_queries = product("rkgts,rksd->rkgtd", by_scores.astype(dtype), keys)
            return Inputs(sums.queries + by_queries, *of_keys.put(before, after))

        sums = gradients._replace(queries=block.cut(gradients.queries))
        with jax.named_scope(BLOCK_PAIRS):
            sums = jax.lax.fori_loop(*level.pairs(number), add_pair, sums)
        return sums._replace(queries=block.put(gradients.queries, sums.queries))

    with jax.named_scope(QUERY_BLOCKS):
        return jax.lax.fori_loop(0, level.number, add_block, gradients)


def _columns(x: Float[Array, "R K r B D"]) -> Float[Array, "R K D r*B"]:
    R, K, _, _, D = x.shape
    return x.reshape(R, K, -1, D).swapaxes(-1, -2)


_attention.defvjp(_forward, _backward)
