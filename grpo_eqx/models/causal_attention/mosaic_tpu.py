"""Attention over whole sequences on TPUs: FlashAttention-2 in kernels compiled by Mosaic.

JAX's own kernels have no gradient for the softmax statistics, which are needed to merge a row's
attention over its prompt with that over itself. So there are three kernels here, each run for the
prompt and then for the row itself: the softmax, where the second run continues from the first; the
gradient of queries, likewise; and the gradient of keys and values. Each accumulates along the last
axis of its grid.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from grpo_eqx.models.causal_attention.base import (
    CausalAttention,
    Inputs,
    Masks,
    Residuals,
    filled,
    on_each_device,
)
from grpo_eqx.models.kv_cache import KeyValues
from grpo_eqx.models.running_softmax import MASKED, RunningSoftmax, product
from grpo_eqx.models.tiles import even_tile

_SUBLANES, _LANES = 16, 128
"""Rows and columns of a register of bfloat16 values."""
_PADDED_QUERY, _PADDED_KEY = -2, -3
"""Spans of padding."""
_VMEM = 16 * 2**20
"""Bytes of vector memory available to a kernel: those of a TPU v4, which has the least."""

_Index = Int[Array, ""] | int
_Kernel = Callable[..., None]


class MosaicAttention(CausalAttention):
    """Attention kernels for TPUs; on a CPU they are interpreted, slowly, for tests.

    On a mesh, each device computes attention for its own prompts or rows, and its own heads.
    """

    mesh: jax.sharding.Mesh
    query_block: int = 1024
    """Maximum number of queries in a block, over all heads that read the same keys."""
    key_block: int = 512
    """Maximum number of keys in a block."""

    def attend(self, inputs: Inputs, masks: Masks) -> Float[Array, "P K R r T D"]:
        interpret = self.mesh.devices.flat[0].platform == "cpu"
        limits = _Limits(self.query_block, self.key_block, interpret)
        return on_each_device(self.mesh, functools.partial(_in_kernels, limits), inputs, masks)


class _Limits(NamedTuple):
    """The largest blocks of queries and keys, and whether kernels are interpreted."""

    queries: int
    keys: int
    interpret: bool

    def positions(self, repeats: int, T: int) -> int:
        """Returns the number of positions in a query block of `repeats` heads."""
        return _block(T, self.queries // repeats, _SUBLANES)

    def width(self, S: int) -> int:
        """Returns the number of keys in a block."""
        return _block(S, self.keys, _LANES)


def _block(length: int, most: int, multiple: int) -> int:
    """Returns the size of about even blocks, as few as `most` allows, in units of `multiple`."""
    even = even_tile(length, max(multiple, most // multiple * multiple))
    return -(-even // multiple) * multiple


class _Spans(NamedTuple):
    """Sequence that each position belongs to, with queries along the rows of a block of scores."""

    queries: Int[Array, "P R T 1"]
    own: Int[Array, "P R 1 S"]
    shared: Int[Array, "P 1 1 S"] | None
    """`_PADDED_KEY` for keys that no query sees; any other value for those that all see."""


def _in_kernels(limits: _Limits, inputs: Inputs, masks: Masks) -> Float[Array, "P K R r T D"]:
    """Computes attention after padding the arrays to whole blocks."""
    repeats, T = inputs.queries.shape[3:5]
    positions, width = limits.positions(repeats, T), limits.width(T)
    queries = filled(inputs.queries, -2, positions)
    own = KeyValues(*(filled(x, -2, width) for x in inputs.own))
    spans = _Spans(
        filled(masks.spans[..., None], -2, positions, _PADDED_QUERY),
        filled(masks.spans[:, :, None], -1, width, _PADDED_KEY),
        None,
    )
    shared = inputs.shared
    if shared is not None and masks.visible is not None:
        width = limits.width(shared.keys.shape[-2])
        shared = KeyValues(*(filled(x, -2, width) for x in shared))
        visible = jnp.where(masks.visible, 0, _PADDED_KEY)[:, None, None]
        spans = spans._replace(shared=filled(visible, -1, width, _PADDED_KEY))
    return _attention(limits, Inputs(queries, own, shared), spans)[..., :T, :]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(limits: _Limits, inputs: Inputs, spans: _Spans) -> Float[Array, "P K R r T D"]:
    return _forward(limits, inputs, spans)[0]


def _forward(
    limits: _Limits, inputs: Inputs, spans: _Spans
) -> tuple[Float[Array, "P K R r T D"], Residuals]:
    attended = None
    for part in _parts(limits, inputs, spans):
        attended = part.attended(attended)
    assert attended is not None
    values = attended.values.astype(inputs.queries.dtype)
    # Saved without the axis of size 1, which would take a row of 128 in memory.
    return values, Residuals(inputs, spans, values, attended.logsumexp[..., 0])


def _backward(
    limits: _Limits, residuals: Residuals, slope: Float[Array, "P K R r T D"]
) -> tuple[Inputs, None]:
    inputs, spans, _, logsumexp = residuals
    known = _Known(slope, logsumexp[..., None], residuals.inner(slope)[..., None])
    parts, by_queries = list(_parts(limits, inputs, spans)), None
    for part in parts:
        by_queries = part.query_gradient(known, by_queries)
    assert by_queries is not None
    *of_shared, by_own = (part.key_gradients(known) for part in parts)
    by_shared = KeyValues(*(x[:, :, 0] for x in of_shared[0])) if of_shared else None
    gradients = Inputs(by_queries, by_own, by_shared)
    return jax.tree.map(lambda g, x: g.astype(x.dtype), gradients, inputs), None


_attention.defvjp(_forward, _backward)


class _Attended(NamedTuple):
    """Attention over some of the keys, float32."""

    values: Float[Array, "P K R r T D"]
    logsumexp: Float[Array, "P K R r T 1"]
    """Logarithm of each query's sum of exponentials."""


class _Known(NamedTuple):
    """Values that the backward pass needs for each query."""

    slope: Float[Array, "P K R r T D"]
    """Gradient with respect to the query's result."""
    logsumexp: Float[Array, "P K R r T 1"]
    inner: Float[Array, "P K R r T 1"]
    """Inner product of slope and result, which a softmax's gradient subtracts."""


class _BlockIndex(NamedTuple):
    """Indices of the blocks that a step of a grid works on."""

    prompt: _Index
    head: _Index
    row: _Index
    queries: _Index
    """Index of the block of queries."""
    owner: _Index
    """Row that the keys belong to; those of a prompt are one row."""
    keys: _Index
    """Index of the block of keys."""


@dataclasses.dataclass(frozen=True)
class _Tiling:
    """Division of attention over a part of the keys into blocks."""

    is_own: bool
    """Whether the keys are the rows' own, of which a query sees none after itself."""
    positions: int
    """Number of positions in a block of queries, the same for each head."""
    width: int
    """Number of keys in a block."""
    query_blocks: int
    key_blocks: int

    def over_keys(self, p: _Index, head: _Index, row: _Index, i: _Index, j: _Index) -> _BlockIndex:
        """Maps a step of the grid that visits the keys for each block of queries."""
        if not self.is_own:
            return _BlockIndex(p, head, row, i, 0, j)
        # Blocks that are skipped are not loaded.
        last = jax.lax.div((i + 1) * self.positions - 1, self.width)
        return _BlockIndex(p, head, row, i, row, jnp.minimum(j, last))

    def over_queries(
        self, p: _Index, head: _Index, owner: _Index, j: _Index, n: _Index
    ) -> _BlockIndex:
        """Maps a step of the grid that visits the queries for each block of keys."""
        row, i = self.queries_at(n)
        if not self.is_own:
            return _BlockIndex(p, head, row, i, owner, j)
        first = jax.lax.div(j * self.width, self.positions)
        i = jnp.maximum(i, jnp.minimum(first, self.query_blocks - 1))
        return _BlockIndex(p, head, owner, i, owner, j)

    def queries_at(self, n: _Index) -> tuple[Int[Array, ""], Int[Array, ""]]:
        """Returns the row and the block of queries at index `n` of that grid's last axis."""
        return jax.lax.div(n, self.query_blocks), jax.lax.rem(n, self.query_blocks)

    def may_see(self, i: _Index, j: _Index) -> Bool[Array, ""]:
        """Returns whether any query of block `i` may see any key of block `j`."""
        return jnp.asarray(not self.is_own or j * self.width < (i + 1) * self.positions)

    def seen(
        self, i: _Index, j: _Index, query_spans: Int[Array, "T 1"], key_spans: Int[Array, "1 S"]
    ) -> Bool[Array, "T S"]:
        """Returns the mask of a block's keys that each position of a block of queries sees."""
        shape = self.positions, self.width
        if not self.is_own:
            return jnp.broadcast_to(key_spans != _PADDED_KEY, shape)
        queries = i * self.positions + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
        keys = j * self.width + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
        return (query_spans == key_spans) & (queries >= keys)


class _Operands(NamedTuple):
    """Inputs of all kernels; within a kernel, references to blocks of them."""

    queries: Float[Array, "P K R r T D"]
    keys: Float[Array, "P K J S D"]
    values: Float[Array, "P K J S D"]
    query_spans: Int[Array, "P R T 1"]
    key_spans: Int[Array, "P J 1 S"]

    def scores(self, tiling: _Tiling, i: _Index, j: _Index) -> Float[Array, "queries keys"]:
        """Computes masked scores of blocks, within a kernel."""
        queries = _flat(self.queries)
        scores = product("md,sd->ms", queries, self.keys[...]) * queries.shape[-1] ** -0.5
        seen = tiling.seen(i, j, self.query_spans[...], self.key_spans[...])
        by_head = scores.reshape(-1, *seen.shape)
        return jnp.where(seen[None], by_head, MASKED).reshape(scores.shape)


def _flat(ref: Any) -> Float[Array, "queries D"]:
    """Returns a block of per-query values of all heads, one row per query."""
    return ref[...].reshape(-1, ref.shape[-1])


def _softmax_kernel(tiling: _Tiling, *refs: Any) -> None:
    operands, start = _Operands(*refs[:5]), refs[5:-5]
    values, logsumexp, *softmax = refs[-5:]
    i, j = pl.program_id(3), pl.program_id(4)

    @pl.when(j == 0)
    def begin() -> None:
        before = RunningSoftmax.over_nothing(_flat(values))
        if start:
            values_before, logsumexp_before = map(_flat, start)
            before = RunningSoftmax(values_before, jnp.ones_like(before.total), logsumexp_before)
        for ref, x in zip(softmax, before, strict=True):
            ref[...] = x

    @pl.when(tiling.may_see(i, j))
    def add() -> None:
        before = RunningSoftmax(*(ref[...] for ref in softmax))
        after = before.updated(operands.scores(tiling, i, j), operands.values[...], "ms,sd->md")
        for ref, x in zip(softmax, after, strict=True):
            ref[...] = x

    @pl.when(j == tiling.key_blocks - 1)
    def finish() -> None:
        result = RunningSoftmax(*(ref[...] for ref in softmax))
        values[...] = result.attended(values.dtype).reshape(values.shape)
        logsumexp[...] = result.logsumexp().reshape(logsumexp.shape)


def _query_gradient_kernel(tiling: _Tiling, *refs: Any) -> None:
    operands, known = _Operands(*refs[:5]), _Known(*refs[5:8])
    start, by_queries = refs[8:-1], refs[-1]
    i, j = pl.program_id(3), pl.program_id(4)

    @pl.when(j == 0)
    def begin() -> None:
        by_queries[...] = start[0][...] if start else jnp.zeros_like(by_queries)

    @pl.when(tiling.may_see(i, j))
    def add() -> None:
        _, by_scores = _weights(tiling, operands, known, i, j)
        by_block = product("ms,sd->md", by_scores, operands.keys[...])
        by_queries[...] += by_block.reshape(by_queries.shape)


def _key_gradients_kernel(tiling: _Tiling, *refs: Any) -> None:
    operands, known = _Operands(*refs[:5]), _Known(*refs[5:8])
    by_keys, by_values = refs[8:]
    j, n = pl.program_id(3), pl.program_id(4)
    _, i = tiling.queries_at(n)

    @pl.when(n == 0)
    def begin() -> None:
        by_keys[...] = jnp.zeros_like(by_keys)
        by_values[...] = jnp.zeros_like(by_values)

    @pl.when(tiling.may_see(i, j))
    def add() -> None:
        weights, by_scores = _weights(tiling, operands, known, i, j)
        by_keys[...] += product("ms,md->sd", by_scores, _flat(operands.queries))
        by_values[...] += product("ms,md->sd", weights, _flat(known.slope))


def _weights(
    tiling: _Tiling, operands: _Operands, known: _Known, i: _Index, j: _Index
) -> tuple[Float[Array, "queries keys"], Float[Array, "queries keys"]]:
    """Computes the softmax and the gradient of its scores, both in the dtype of the queries."""
    queries, slope = _flat(operands.queries), _flat(known.slope)
    weights = jnp.exp(operands.scores(tiling, i, j) - _flat(known.logsumexp))
    by_weights = product("md,sd->ms", slope, operands.values[...])
    by_scores = weights * (by_weights - _flat(known.inner)) * queries.shape[-1] ** -0.5
    return weights.astype(queries.dtype), by_scores.astype(queries.dtype)


@dataclasses.dataclass(frozen=True)
class _Part:
    """Attention over the prompts' keys, or over the rows' own."""

    tiling: _Tiling
    operands: _Operands
    interpret: bool

    def attended(self, before: _Attended | None) -> _Attended:
        """Computes attention over these keys and those of `before`."""
        *heads, T, D = queries = self.operands.queries.shape
        rows = self.tiling.positions * heads[-1]
        values, logsumexp = self._over_keys(
            _softmax_kernel,
            () if before is None else before,
            (queries, (*heads, T, 1)),
            scratch=[pltpu.VMEM((rows, size), jnp.float32) for size in (D, 1, 1)],
        )
        return _Attended(values, logsumexp)

    def query_gradient(
        self, known: _Known, before: Float[Array, "P K R r T D"] | None
    ) -> Float[Array, "P K R r T D"]:
        """Adds these keys' part of the queries' gradient to that of the keys before."""
        reads = known if before is None else (*known, before)
        return self._over_keys(_query_gradient_kernel, reads, (self.operands.queries.shape,))[0]

    def key_gradients(self, known: _Known) -> KeyValues:
        keys = self.operands.keys.shape
        steps = self.tiling.query_blocks * (self.operands.queries.shape[2] // keys[2])
        grid = *keys[:3], self.tiling.key_blocks, steps
        block_index = self.tiling.over_queries
        return KeyValues(*self._run(_key_gradients_kernel, grid, block_index, known, (keys, keys)))

    def _over_keys(
        self,
        kernel: _Kernel,
        reads: tuple[Array, ...],
        results: tuple[tuple[int, ...], ...],
        scratch: Sequence[Any] = (),
    ) -> Sequence[Array]:
        tiling = self.tiling
        grid = *self.operands.queries.shape[:3], tiling.query_blocks, tiling.key_blocks
        return self._run(kernel, grid, tiling.over_keys, reads, results, scratch)

    def _run(
        self,
        kernel: _Kernel,
        grid: tuple[int, ...],
        block_index: Callable[..., _BlockIndex],
        reads: tuple[Array, ...],
        results: tuple[tuple[int, ...], ...],
        scratch: Sequence[Any] = (),
    ) -> Sequence[Array]:
        """Runs a kernel on the operands and `reads`; its float32 results have shapes `results`."""
        blocks = _BlockSpecs(self.tiling, block_index)
        return pl.pallas_call(
            functools.partial(kernel, self.tiling),
            out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in results],
            grid=grid,
            in_specs=[
                *(blocks.of(x.shape) for x in self.operands[:3]),
                blocks.of_query_spans(),
                blocks.of_key_spans(),
                *(blocks.of(x.shape) for x in reads),
            ],
            out_specs=[blocks.of(shape) for shape in results],
            scratch_shapes=scratch,
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel",) * 4 + ("arbitrary",), vmem_limit_bytes=_VMEM
            ),
            interpret=self.interpret,
        )(*self.operands, *reads)


class _BlockSpecs(NamedTuple):
    """Block specs of arrays at each step of a grid."""

    tiling: _Tiling
    block_index: Callable[..., _BlockIndex]

    def of(self, shape: tuple[int, ...]) -> pl.BlockSpec:
        """Returns the spec for queries `[P, K, R, r, T, D]` or keys `[P, K, J, S, D]`."""
        if len(shape) == 6:
            return self._spec(
                (None, None, None, shape[3], self.tiling.positions, shape[5]),
                lambda x: (x.prompt, x.head, x.row, 0, x.queries, 0),
            )
        return self._spec(
            (None, None, None, self.tiling.width, shape[4]),
            lambda x: (x.prompt, x.head, x.owner, x.keys, 0),
        )

    def of_query_spans(self) -> pl.BlockSpec:
        block = (None, None, self.tiling.positions, 1)
        return self._spec(block, lambda x: (x.prompt, x.row, x.queries, 0))

    def of_key_spans(self) -> pl.BlockSpec:
        block = (None, None, 1, self.tiling.width)
        return self._spec(block, lambda x: (x.prompt, x.owner, 0, x.keys))

    def _spec(
        self, block: tuple[int | None, ...], index: Callable[[_BlockIndex], tuple[_Index, ...]]
    ) -> pl.BlockSpec:
        return pl.BlockSpec(block, lambda *step: index(self.block_index(*step)))


def _parts(limits: _Limits, inputs: Inputs, spans: _Spans) -> Iterator[_Part]:
    """Yields attention over the prompts' keys, if there are any, then over the rows' own."""
    queries, own, shared = inputs
    positions = limits.positions(*queries.shape[3:5])

    def part(kv: KeyValues, key_spans: Int[Array, "P J 1 S"], is_own: bool) -> _Part:
        S = kv.keys.shape[-2]
        width = limits.width(S)
        tiling = _Tiling(is_own, positions, width, queries.shape[4] // positions, S // width)
        return _Part(tiling, _Operands(queries, *kv, spans.queries, key_spans), limits.interpret)

    if shared is not None and spans.shared is not None:
        prompt = KeyValues(*(x[:, :, None] for x in shared))
        yield part(prompt, spans.shared, is_own=False)
    yield part(own, spans.own, is_own=True)
