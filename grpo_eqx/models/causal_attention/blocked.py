"""Attention over whole sequences in blocks, forward and backward.

FlashAttention-2 (arXiv 2307.08691) in plain JAX, for any device: the forward pass keeps a running
softmax over blocks of keys, the backward pass recomputes the weights from its statistics, and
blocks in which no query sees a key are never computed. So no `T x T` array is ever materialized.
"""

import functools
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

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
        inputs = jax.tree.map(lambda x: filled(x, -2, size), inputs)
        return _attention(size, softcap, inputs, visible.filled(size))[..., :T, :]


class _Pairs(NamedTuple):
    """Pairs of a block of queries and a block of keys, of which some query of some row sees any."""

    queries: Int[Array, " pairs"]
    keys: Int[Array, " pairs"]
    number: Int[Array, ""]
    """Number of pairs; the rest of the arrays is padding."""

    @classmethod
    def of(cls, visible: Visible, size: int) -> "_Pairs":
        meets = visible.blocks(size, size).any(axis=0)
        most = len(meets) * (len(meets) + 1) // 2
        queries, keys = jnp.nonzero(meets, size=most, fill_value=0)
        return cls(queries, keys, meets.sum())


class _Block(NamedTuple):
    """Block of positions, which are the second-to-last axis of every array."""

    size: int
    number: _Index

    @property
    def start(self) -> _Index:
        return self.number * self.size

    def cut(self, tree: Arrays) -> Arrays:
        return jax.tree.map(
            lambda x: jax.lax.dynamic_slice_in_dim(x, self.start, self.size, x.ndim - 2), tree
        )

    def put(self, tree: Arrays, block: Arrays) -> Arrays:
        return jax.tree.map(
            lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, self.start, x.ndim - 2),
            tree,
            block,
        )


def _scores(
    queries: Float[Array, "R K r B D"],
    keys: Float[Array, "R K B D"],
    visible: Visible,
    i: _Block,
    j: _Block,
    softcap: float | None,
) -> Float[Array, "R K r B B"]:
    """Computes capped and masked scores of a block of queries with a block of keys."""
    offsets = jnp.arange(i.size, dtype=jnp.int32)
    of_block = Visible(*i.cut(tuple(x[..., None] for x in visible)))
    seen = of_block.shows(i.start + offsets[:, None], j.start + offsets)
    scores = product("rkgtd,rksd->rkgts", queries, keys) * queries.shape[-1] ** -0.5
    return jnp.where(seen[:, None, None], soft_capped(scores, softcap), MASKED)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(
    size: int, softcap: float | None, inputs: Inputs, visible: Visible
) -> Float[Array, "R K r T D"]:
    return _forward(size, softcap, inputs, visible)[0]


def _forward(
    size: int, softcap: float | None, inputs: Inputs, visible: Visible
) -> tuple[Float[Array, "R K r T D"], Residuals]:
    pairs = _Pairs.of(visible, size)

    def add(n: _Index, part: RunningSoftmax) -> RunningSoftmax:
        i, j = _Block(size, pairs.queries[n]), _Block(size, pairs.keys[n])
        keys, values = j.cut((inputs.keys, inputs.values))
        scores = _scores(i.cut(inputs.queries), keys, visible, i, j, softcap)
        return i.put(part, i.cut(part).updated(scores, values, "rkgts,rksd->rkgtd"))

    part = RunningSoftmax.over_nothing(inputs.queries)
    part = jax.lax.fori_loop(0, pairs.number, add, part)
    attended = part.attended(inputs.queries.dtype)
    return attended, Residuals(inputs, visible, attended, part.logsumexp()[..., 0])


class _Queries(NamedTuple):
    """Queries, with the values that the backward pass needs for them."""

    queries: Float[Array, "R K r T D"]
    slope: Float[Array, "R K r T D"]
    """Gradient with respect to the queries' results."""
    logsumexp: Float[Array, "R K r T 1"]
    inner: Float[Array, "R K r T 1"]
    """Inner products of slopes and results, which a softmax's gradient subtracts."""

    def gradients(
        self,
        scores: Float[Array, "R K r B B"],
        keys: Float[Array, "R K B D"],
        values: Float[Array, "R K B D"],
        softcap: float | None,
    ) -> Inputs:
        """Computes a block's contributions to the gradients of queries, keys and values."""
        dtype, scale = self.queries.dtype, self.queries.shape[-1] ** -0.5
        weights = jnp.exp(scores - self.logsumexp)
        by_weights = product("rkgtd,rksd->rkgts", self.slope, values)
        by_scores = weights * (by_weights - self.inner) * scale
        by_scores = gradient_before_cap(by_scores, scores, softcap).astype(dtype)
        # XLA's CPU compiler copies the left operand to transpose it, so the narrower one is there.
        # Without the barrier, the compiler swaps the operands back.
        by_keys, by_values = jax.lax.optimization_barrier(
            (
                product("rkgtd,rkgts->rkds", self.queries, by_scores),
                product("rkgtd,rkgts->rkds", self.slope, weights.astype(dtype)),
            )
        )
        return Inputs(
            queries=product("rkgts,rksd->rkgtd", by_scores, keys),
            keys=by_keys.swapaxes(-1, -2),
            values=by_values.swapaxes(-1, -2),
        )


def _backward(
    size: int,
    softcap: float | None,
    residuals: Residuals,
    slope: Float[Array, "R K r T D"],
) -> tuple[Inputs, None]:
    inputs, visible, _, logsumexp = residuals
    pairs = _Pairs.of(visible, size)
    of_queries = _Queries(
        inputs.queries, slope, logsumexp[..., None], residuals.inner(slope)[..., None]
    )

    def add(n: _Index, sums: Inputs) -> Inputs:
        i, j = _Block(size, pairs.queries[n]), _Block(size, pairs.keys[n])
        queries, (keys, values) = i.cut(of_queries), j.cut((inputs.keys, inputs.values))
        scores = _scores(queries.queries, keys, visible, i, j, softcap)
        more = queries.gradients(scores, keys, values, softcap)
        return Inputs(
            *(
                block.put(x, block.cut(x) + y)
                for block, x, y in zip((i, j, j), sums, more, strict=True)
            )
        )

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), inputs)
    gradients = jax.lax.fori_loop(0, pairs.number, add, zeros)
    return jax.tree.map(lambda g, x: g.astype(x.dtype), gradients, inputs), None


_attention.defvjp(_forward, _backward)
