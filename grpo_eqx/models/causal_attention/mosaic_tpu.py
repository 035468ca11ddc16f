"""Attention over whole sequences on TPUs: FlashAttention-2 in kernels compiled by Mosaic.

There are three kernels: the softmax; the gradient of queries; and the gradient of keys and values.
Each accumulates along the last axis of its grid. Blocks of queries and keys of which no query sees
a key are neither computed nor loaded.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from grpo_eqx.models.causal_attention.base import (
    BlockSizes,
    CausalAttention,
    Inputs,
    Residuals,
    Visible,
    on_each_device,
)
from grpo_eqx.models.product import product
from grpo_eqx.models.running_softmax import MASKED, RunningSoftmax
from grpo_eqx.models.softcap import gradient_before_cap, soft_capped
from grpo_eqx.models.tiles import even_tile, filled
from grpo_eqx.sharding.rollout_layout import RolloutLayout

_SUBLANES, _LANES = 16, 128
"""Rows and columns of a register of bfloat16 values."""
_VMEM = 16 * 2**20
"""Bytes of vector memory available to a kernel: those of a TPU v4, which has the least."""

_Index = Int[Array, ""] | int


class MosaicAttention(CausalAttention):
    """Attention kernels for TPUs; on a CPU they are interpreted, slowly, for tests.

    On a mesh, each device computes attention for its own rows and heads.
    """

    mesh: jax.sharding.Mesh
    query_block: int = 1024
    """Maximum number of queries in a block, over all heads that read the same keys."""
    key_block: int = 512
    """Maximum number of keys in a block."""
    layout: RolloutLayout | None = None
    """Layout of the rollout whose prompts are the rows. `None`: rows of training."""

    def over(self, layout: RolloutLayout) -> "MosaicAttention":
        return dataclasses.replace(self, layout=layout)

    def block_sizes(self, length: int, repeats: int) -> BlockSizes:
        queries = even_tile(length, self.query_block // repeats, _SUBLANES)
        padded = -(-length // queries) * queries
        return BlockSizes(queries, even_tile(padded, self.key_block, _LANES))

    def attend(
        self, inputs: Inputs, visible: Visible, softcap: float | None
    ) -> Float[Array, "R K r T D"]:
        run = functools.partial(self._in_kernels, softcap)
        return on_each_device(self.layout or self.mesh, run, inputs, visible)

    def _in_kernels(
        self, softcap: float | None, inputs: Inputs, visible: Visible
    ) -> Float[Array, "R K r T D"]:
        """Computes attention after padding the arrays to whole blocks."""
        repeats, T = inputs.queries.shape[2:4]
        positions, width, _ = self.block_sizes(T, repeats)
        queries, keys, values = (filled(x, -2, positions) for x in inputs)
        inputs = Inputs(queries, filled(keys, -2, width), filled(values, -2, width))
        sizes = _Sizes(positions, width, self.mesh.devices.flat[0].platform == "cpu")
        return _attention(sizes, softcap, inputs, visible.filled(positions))[..., :T, :]


class _Sizes(NamedTuple):
    """Sizes of blocks, and whether kernels are interpreted."""

    positions: int
    """Number of positions in a block of queries, the same for each head."""
    width: int
    """Number of keys in a block."""
    interpret: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(
    sizes: _Sizes, softcap: float | None, inputs: Inputs, visible: Visible
) -> Float[Array, "R K r T D"]:
    return _forward(sizes, softcap, inputs, visible)[0]


def _forward(
    sizes: _Sizes, softcap: float | None, inputs: Inputs, visible: Visible
) -> tuple[Float[Array, "R K r T D"], Residuals]:
    *heads, D = inputs.queries.shape
    rows = heads[2] * sizes.positions
    attended, logsumexp = _Kernel.over_keys(sizes, softcap, inputs, visible).run(
        _softmax_kernel,
        results=[inputs.queries, jax.ShapeDtypeStruct((*heads, 1), jnp.float32)],
        scratch=[pltpu.VMEM((rows, size), jnp.float32) for size in (D, 1, 1)],
    )
    # Saved without the axis of size 1, which would take a row of 128 in memory.
    return attended, Residuals(inputs, visible, attended, logsumexp[..., 0])


def _backward(
    sizes: _Sizes,
    softcap: float | None,
    residuals: Residuals,
    slope: Float[Array, "R K r T D"],
) -> tuple[Inputs, None]:
    inputs, visible, _, logsumexp = residuals
    known = _Known(slope, jnp.stack([logsumexp, residuals.inner(slope)], axis=-1))
    of_queries, *of_keys = (jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in inputs)
    over_keys = _Kernel.over_keys(sizes, softcap, inputs, visible)
    gradients = Inputs(
        *over_keys.run(_query_gradient_kernel, known, results=[of_queries]),
        *over_keys.over_queries().run(_key_gradients_kernel, known, results=of_keys),
    )
    return jax.tree.map(lambda g, x: g.astype(x.dtype), gradients, inputs), None


_attention.defvjp(_forward, _backward)


class _Known(NamedTuple):
    """Values that the backward pass needs for each query."""

    slope: Float[Array, "R K r T D"]
    """Gradient with respect to the query's result."""
    statistics: Float[Array, "R K r T 2"]
    """Logarithm of the sum of exponentials, and the inner product of slope and result."""


class _Operands(NamedTuple):
    """Inputs of all kernels; within a kernel, references to blocks of them."""

    softcap: float | None
    """Soft cap of the scores; a constant of the kernel, where the others are arrays."""
    queries: Float[Array, "R K r T D"]
    keys: Float[Array, "R K S D"]
    values: Float[Array, "R K S D"]
    visible: Int[Array, "R T 3"]
    """The fields of `Visible`, side by side: each alone would take as much memory."""

    def scores(self, i: _Index, j: _Index) -> Float[Array, "queries keys"]:
        """Computes capped, masked scores of query block `i` and key block `j`, in a kernel."""
        queries = _flat(self.queries)
        scores = product("md,sd->ms", queries, self.keys[...]) * queries.shape[-1] ** -0.5
        shape = self.visible.shape[0], self.keys.shape[0]
        of_block = Visible(*(self.visible[:, n : n + 1] for n in range(3)))
        seen = of_block.shows(
            i * shape[0] + jax.lax.broadcasted_iota(jnp.int32, shape, 0),
            j * shape[1] + jax.lax.broadcasted_iota(jnp.int32, shape, 1),
        )
        by_head = soft_capped(scores, self.softcap).reshape(-1, *shape)
        return jnp.where(seen[None], by_head, MASKED).reshape(scores.shape)

    def weights(
        self, known: _Known, i: _Index, j: _Index
    ) -> tuple[Float[Array, "queries keys"], Float[Array, "queries keys"]]:
        """Computes the softmax and the gradient of its scores, both in the queries' dtype."""
        statistics, (dtype, D) = _flat(known.statistics), (self.queries.dtype, self.keys.shape[1])
        scores = self.scores(i, j)
        weights = jnp.exp(scores - statistics[:, :1])
        by_weights = product("md,sd->ms", _flat(known.slope), self.values[...])
        by_scores = weights * (by_weights - statistics[:, 1:]) * D**-0.5
        by_scores = gradient_before_cap(by_scores, scores, self.softcap)
        return weights.astype(dtype), by_scores.astype(dtype)


def _flat(ref: Any) -> Float[Array, "queries D"]:
    """Returns a block of per-query values of all heads, one row per query."""
    return ref[...].reshape(-1, ref.shape[-1])


class _Step(NamedTuple):
    """Blocks that a step of a grid works on."""

    queries: _Index
    """Index of the block of queries."""
    keys: _Index
    """Index of the block of keys."""
    is_first: Bool[Array, ""]
    """Whether sums start with this step."""
    is_last: Bool[Array, ""]
    meets: Bool[Array, ""]
    """Whether any of the queries sees any of the keys."""


def _softmax_kernel(step: _Step, operands: _Operands, *refs: Any) -> None:
    attended, logsumexp, *softmax = refs

    def put(x: RunningSoftmax) -> None:
        for ref, values in zip(softmax, x, strict=True):
            ref[...] = values

    @pl.when(step.is_first)
    def begin() -> None:
        put(RunningSoftmax.over_nothing(_flat(attended)))

    @pl.when(step.meets)
    def add() -> None:
        before = RunningSoftmax(*(ref[...] for ref in softmax))
        scores = operands.scores(step.queries, step.keys)
        put(before.updated(scores, operands.values[...], "ms,sd->md"))

    @pl.when(step.is_last)
    def finish() -> None:
        result = RunningSoftmax(*(ref[...] for ref in softmax))
        attended[...] = result.attended(attended.dtype).reshape(attended.shape)
        logsumexp[...] = result.logsumexp().reshape(logsumexp.shape)


def _query_gradient_kernel(step: _Step, operands: _Operands, *refs: Any) -> None:
    known, by_queries = _Known(*refs[:2]), refs[2]

    @pl.when(step.is_first)
    def begin() -> None:
        by_queries[...] = jnp.zeros_like(by_queries)

    @pl.when(step.meets)
    def add() -> None:
        _, by_scores = operands.weights(known, step.queries, step.keys)
        by_block = product("ms,sd->md", by_scores, operands.keys[...])
        by_queries[...] += by_block.reshape(by_queries.shape)


def _key_gradients_kernel(step: _Step, operands: _Operands, *refs: Any) -> None:
    known, (by_keys, by_values) = _Known(*refs[:2]), refs[2:]

    @pl.when(step.is_first)
    def begin() -> None:
        by_keys[...] = jnp.zeros_like(by_keys)
        by_values[...] = jnp.zeros_like(by_values)

    @pl.when(step.meets)
    def add() -> None:
        weights, by_scores = operands.weights(known, step.queries, step.keys)
        by_keys[...] += product("ms,md->sd", by_scores, _flat(operands.queries))
        by_values[...] += product("ms,md->sd", weights, _flat(known.slope))


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """Run of a kernel: for each block of queries over those of keys, or the other way around."""

    sizes: _Sizes
    operands: _Operands
    meets: Bool[Array, "R outer inner"]
    """Pairs of blocks of which any query sees any key; sums are over the inner ones."""
    queries_are_inner: bool

    @classmethod
    def over_keys(
        cls, sizes: _Sizes, softcap: float | None, inputs: Inputs, visible: Visible
    ) -> "_Kernel":
        meets = visible.blocks(sizes.positions, sizes.width)
        operands = _Operands(softcap, *inputs, jnp.stack(visible, axis=-1))
        return cls(sizes, operands, meets, False)

    def over_queries(self) -> "_Kernel":
        """Returns the run that visits the same blocks the other way around."""
        return dataclasses.replace(
            self, meets=self.meets.swapaxes(1, 2), queries_are_inner=not self.queries_are_inner
        )

    def run(
        self,
        kernel: Callable[..., None],
        reads: Sequence[Array] = (),
        *,
        results: Sequence[Array | jax.ShapeDtypeStruct],
        scratch: Sequence[Any] = (),
    ) -> Sequence[Array]:
        """Runs `kernel` on the operands and `reads`, for results like `results`.

        Takes 4 bytes of scalar memory for each pair of blocks.
        """
        R, outer, inner = self.meets.shape
        inputs = *self.operands[1:], *reads
        return pl.pallas_call(
            functools.partial(self._body, kernel),
            out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results],
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(R, self.operands.keys.shape[1], outer, inner),
                in_specs=[self._spec(x.shape) for x in inputs],
                out_specs=[self._spec(x.shape) for x in results],
                scratch_shapes=scratch,
            ),
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel",) * 3 + ("arbitrary",), vmem_limit_bytes=_VMEM
            ),
            interpret=self.sizes.interpret,
        )(_loads(self.meets), *inputs)

    def _body(self, kernel: Callable[..., None], loads: Any, *refs: Any) -> None:
        row, _, outer, inner = (pl.program_id(axis) for axis in range(4))
        step = _Step(
            *self._pair(outer, inner),
            is_first=inner == 0,
            is_last=inner == self.meets.shape[2] - 1,
            meets=self._loaded(loads, row, outer, inner) == inner,
        )
        kernel(step, _Operands(self.operands.softcap, *refs[:4]), *refs[4:])

    def _spec(self, shape: tuple[int, ...]) -> pl.BlockSpec:
        """Returns the spec for queries `[R, K, r, T, D]` or `[R, T, D]`, or keys `[R, K, S, D]`."""

        def index(row: _Index, head: _Index, outer: _Index, inner: _Index, loads: Any) -> Any:
            i, j = self._pair(outer, self._loaded(loads, row, outer, inner))
            return {5: (row, head, 0, i, 0), 4: (row, head, j, 0), 3: (row, i, 0)}[len(shape)]

        (positions, width, _), D = self.sizes, shape[-1]
        blocks = {
            5: (None, None, shape[2], positions, D),
            4: (None, None, width, D),
            3: (None, positions, D),
        }
        return pl.BlockSpec(blocks[len(shape)], index)

    def _pair(self, outer: _Index, inner: _Index) -> tuple[_Index, _Index]:
        """Returns the indices of the block of queries and the block of keys."""
        return (inner, outer) if self.queries_are_inner else (outer, inner)

    def _loaded(self, loads: Any, row: _Index, outer: _Index, inner: _Index) -> Int[Array, ""]:
        """Returns the index of the inner block that a step loads."""
        _, outers, inners = self.meets.shape
        return loads[(row * outers + outer) * inners + inner]


def _loads(meets: Bool[Array, "R outer inner"]) -> Int[Array, " pairs"]:
    """Returns the inner block that each step loads: its own only if that meets the outer one.

    The others load nothing new: they repeat the last that did, or begin with the first that will.
    """
    own = jnp.arange(meets.shape[2], dtype=jnp.int32)
    last = jax.lax.cummax(jnp.where(meets, own, -1), axis=2)
    first = jnp.argmax(meets, axis=2, keepdims=True).astype(jnp.int32)
    return jnp.maximum(first, last).reshape(-1)
