"""`TokenStats` and their gradient, one tile of tokens x vocabulary at a time, on any mesh.

The loops over tiles, the exchange between devices and the custom derivative are shared by all
backends that define how a tile is computed. The vocabulary is the outer loop: each slice of the
head is gathered and cast once, and each slice of its gradient is summed over the tokens in float32
and then written once, so neither exists whole in a layout or dtype other than the parameter's own.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from grpo_eqx.common.shapes import Number
from grpo_eqx.loss_backends.base import TokenStats
from grpo_eqx.loss_backends.softmax import Partial, ScoreGradient
from grpo_eqx.loss_backends.tiles import ScoreTiles, Tiles
from grpo_eqx.models.product import product
from grpo_eqx.models.softcap import gradient_before_cap
from grpo_eqx.models.tiles import even_tile
from grpo_eqx.sharding.rules import (
    BATCH_AXES,
    batch_sharding,
    laid_out_embeddings,
    parameter_sharding,
)

STRIP = 128
"""Preferred divisor of tile sizes, to align with registers and kernels' blocks."""


class _Layout(NamedTuple):
    """Layout of the arrays on a mesh; without one, they are whole on one device."""

    mesh: jax.sharding.Mesh | None
    tokens: PartitionSpec
    head: PartitionSpec

    @classmethod
    def of(cls, mesh: jax.sharding.Mesh | None, ids: Array, head: Array) -> "_Layout":
        if mesh is None or mesh.size == 1:
            return cls(None, PartitionSpec(), PartitionSpec(None, None))
        P, G = ids.shape[:2]
        sharding = parameter_sharding(mesh, ("vocab", "hidden"), head.shape)
        return cls(mesh, batch_sharding(mesh, P, G).spec, sharding.spec)

    def on_each_device(
        self, function: Callable[..., Any], in_specs: Any, out_specs: Any
    ) -> Callable[..., Any]:
        """Wraps `function` to run on each device's own shards."""
        if self.mesh is None:
            return function
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def sum_over_vocabulary_axis(self, x: Array) -> Array:
        axis = self.head[0]
        return x if axis is None else jax.lax.psum(x, axis)

    def first_row(self, head: Float[Array, "V h"]) -> Int[Array, ""] | int:
        """Returns the vocabulary index of row 0 of this device's part of the head."""
        axis = self.head[0]
        return 0 if axis is None else jax.lax.axis_index(axis) * len(head)

    def gather(self, rows: Float[Array, "v h"]) -> Float[Array, "v H"]:
        """Gathers whole rows of the head from the devices' parts of them."""
        axis = self.head[1]
        return rows if axis is None else jax.lax.all_gather(rows, axis, axis=1, tiled=True)

    def sum_over_tokens(self, gradient: Float[Array, "v H"]) -> Float[Array, "v h"]:
        """Sums whole rows' gradient over all devices' tokens; returns this device's part of it."""
        for axis in BATCH_AXES if self.mesh is not None else ():
            if axis == self.head[1]:
                gradient = jax.lax.psum_scatter(gradient, axis, scatter_dimension=1, tiled=True)
            else:
                gradient = jax.lax.psum(gradient, axis)
        return gradient


@dataclasses.dataclass(frozen=True)
class _Slices:
    """A device's part of the vocabulary, cut into slices of equal size."""

    count: int
    size: int
    total: int

    @classmethod
    def of(cls, head: Float[Array, "V h"], most: int) -> "_Slices":
        size = tile_size(len(head), most)
        return cls(-(-len(head) // size), size, len(head))

    def start(self, index: Int[Array, ""]) -> Int[Array, ""]:
        """Returns a slice's first row. The last one reaches back, to be as large as the others."""
        return jnp.minimum(index * self.size, self.total - self.size)

    def first_new(self, index: Int[Array, ""]) -> Int[Array, ""]:
        """Returns the first row, relative to its slice, that no earlier slice covered."""
        if self.total % self.size == 0:
            return jnp.int32(0)  # compilers then leave out the comparisons with it
        return index * self.size - self.start(index)

    def cut(self, head: Float[Array, "V h"], index: Int[Array, ""]) -> Float[Array, "v h"]:
        # Compilers prefer to cast the whole head before the loop, and slice that: the CPU's, which
        # widens bfloat16, unless the slice depends on the loop; the TPU's, unless bits are sliced.
        head, index = jax.lax.optimization_barrier((head, index))
        rows = jax.lax.dynamic_slice_in_dim(head, self.start(index), self.size)
        bits = jnp.dtype(f"uint{8 * head.dtype.itemsize}")
        rows = jax.lax.optimization_barrier(jax.lax.bitcast_convert_type(rows, bits))
        return jax.lax.bitcast_convert_type(rows, head.dtype)

    def write(
        self, whole: Float[Array, "V h"], rows: Float[Array, "v h"], index: Int[Array, ""]
    ) -> Float[Array, "V h"]:
        return jax.lax.dynamic_update_slice_in_dim(whole, rows, self.start(index), axis=0)


class _Sums(NamedTuple):
    """Sums over a part of the vocabulary."""

    scores: Partial
    rows: Float[Array, "*n H"] | None
    """Sum of the rows that `ScoreTiles.weighted_rows` weights, where the head is not trained."""

    def relative_to(self, scores: Partial, temperature: Number) -> Float[Array, "*n H"] | None:
        """Returns the rows' sum relative to the largest of other scores."""
        if self.rows is None:
            return None
        return self.rows * self.scores.factor(scores.highest, temperature)[..., None]

    def plus(self, other: "_Sums", temperature: Number) -> "_Sums":
        scores = self.scores.plus(other.scores, temperature)
        rows = (x.relative_to(scores, temperature) for x in (self, other))
        return _Sums(scores, jax.tree.map(jnp.add, *rows))

    def over_axis(self, name: str, temperature: Number) -> "_Sums":
        scores = self.scores.over_axis(name, temperature)
        return _Sums(scores, jax.lax.psum(self.relative_to(scores, temperature), name))


class _Residuals(NamedTuple):
    hidden: Float[Array, "*batch T H"]
    head: Float[Array, "V H"]
    ids: Int[Array, "*batch T"]
    sums: Partial
    temperature: Number
    slope: Float[Array, "*batch T H"] | None
    """Gradient of the log-probs by the hidden states, float32, where the head is not trained."""


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def tiled_stats(
    hidden: Float[Array, "*batch T H"],
    head: Float[Array, "V H"],
    ids: Int[Array, "*batch T"],
    temperature: Number,
    tiles: Tiles,
    mesh: jax.sharding.Mesh | None,
) -> TokenStats:
    """Computes `LossBackend.token_stats`, tile by tile."""
    sums = _sums(hidden, head, ids, temperature, tiles, mesh)
    return sums.scores.stats(temperature)


def _forward(
    hidden: CustomVJPPrimal,
    head: CustomVJPPrimal,
    ids: CustomVJPPrimal,
    temperature: CustomVJPPrimal,
    tiles: Tiles,
    mesh: jax.sharding.Mesh | None,
) -> tuple[TokenStats, _Residuals]:
    arguments, divisor = (hidden.value, head.value, ids.value), temperature.value
    sums = _sums(*arguments, divisor, tiles, mesh, trains_head=head.perturbed)
    slope = None
    if sums.rows is not None:
        own_rows = laid_out_embeddings(head.value[ids.value].astype(hidden.value.dtype), mesh)
        rest = -jnp.expm1(sums.scores.stats(divisor).logps)
        rest = gradient_before_cap(rest, sums.scores.chosen, tiles.softcap)
        # The token's own row is apart: with a probability near 1, its rounded weight would not
        # cancel.
        others = sums.rows / sums.scores.sums[..., None]
        slope = (rest[..., None] * own_rows - others) * (1 / divisor)
    residuals = _Residuals(*arguments, sums.scores, divisor, slope)
    return sums.scores.stats(divisor), residuals


def _sums(
    hidden: Float[Array, "*batch T H"],
    head: Float[Array, "V H"],
    ids: Int[Array, "*batch T"],
    temperature: Number,
    tiles: Tiles,
    mesh: jax.sharding.Mesh | None,
    *,
    trains_head: bool = True,
) -> _Sums:
    """Computes the sums over the vocabulary.

    If the head is not trained, and the tiles can, they include the sums of rows, from which the
    gradient follows without a second pass.
    """
    layout = _Layout.of(mesh, ids, head)

    def local(hidden: Array, head: Array, ids: Array, temperature: Number) -> _Sums:
        slices = _Slices.of(head, tiles.vocabulary)
        own_ids = ids - layout.first_row(head)
        cut = _cut_tokens((hidden, own_ids), ids.ndim, tiles.tokens)
        count, n = cut[1].shape
        weighing = tiles if isinstance(tiles, ScoreTiles) and not trains_head else None

        def add_slice(index: Array, done: _Sums) -> _Sums:
            rows = layout.gather(slices.cut(head, index).astype(hidden.dtype))

            def add_tile(tile: Array, done: _Sums) -> _Sums:
                hidden, ids = jax.tree.map(lambda x: x[tile], cut)
                rest = ids - slices.start(index), slices.first_new(index), temperature
                if weighing is not None:
                    part = _Sums(*weighing.weighted_rows(hidden, rows, *rest))
                else:
                    part = _Sums(tiles.sums(hidden, rows, *rest).merged(temperature), None)
                sums = jax.tree.map(lambda x: x[tile], done).plus(part, temperature)
                put = partial(jax.lax.dynamic_update_index_in_dim, index=tile, axis=0)
                return jax.tree.map(put, done, sums)

            return jax.lax.fori_loop(0, count, add_tile, done)

        no_rows = None if weighing is None else jnp.zeros(cut[0].shape, jnp.float32)
        start = _Sums(Partial.of_nothing((count, n)), no_rows)
        sums = jax.lax.fori_loop(0, slices.count, add_slice, start)
        sums = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[: ids.size], sums)
        sums = jax.tree.map(lambda x: x.reshape(*ids.shape, *x.shape[1:]), sums)
        axis = layout.head[0]
        return sums if axis is None else sums.over_axis(axis, temperature)

    tokens = layout.tokens
    arguments = tokens, layout.head, tokens, PartitionSpec()
    return layout.on_each_device(local, arguments, tokens)(hidden, head, ids, temperature)


def _backward(
    tiles: Tiles,
    mesh: jax.sharding.Mesh | None,
    residuals: _Residuals,
    cotangents: TokenStats,
) -> tuple[Array, Array | None, None, None]:
    hidden, head, ids, sums, temperature, slope = residuals
    others = cotangents.entropies, cotangents.logsumexps
    if slope is not None and all(isinstance(x, SymbolicZero) for x in others):
        of_hidden = jnp.asarray(cotangents.logps)[..., None] * slope
        return of_hidden.astype(hidden.dtype), None, None, None
    cotangents = TokenStats(*map(_instantiated, cotangents))
    layout = _Layout.of(mesh, ids, head)

    def local(
        hidden: Array, head: Array, ids: Array, gradient: ScoreGradient, temperature: Number
    ) -> tuple[Array, Array]:
        slices = _Slices.of(head, tiles.vocabulary)
        own_ids = ids - layout.first_row(head)
        cut = _TokenTiles(*_cut_tokens((hidden, own_ids, gradient), ids.ndim, tiles.tokens))

        def add_slice(index: Array, gradients: tuple[Array, Array]) -> tuple[Array, Array]:
            of_hidden, of_head = gradients
            rows = layout.gather(slices.cut(head, index).astype(hidden.dtype))
            slice_ = _HeadSlice(rows, slices.start(index), slices.first_new(index))
            of_hidden, of_rows = _slice_gradients(cut, slice_, of_hidden, temperature, tiles)
            # Rows that an earlier slice covered are rewritten with the same values.
            of_rows = layout.sum_over_tokens(of_rows).astype(head.dtype)
            return of_hidden, slices.write(of_head, of_rows, index)

        count, n, H = cut.hidden.shape
        start = jnp.zeros((count, n, H), jnp.float32), jnp.zeros_like(head)
        of_hidden, of_head = jax.lax.fori_loop(0, slices.count, add_slice, start)
        of_hidden = layout.sum_over_vocabulary_axis(of_hidden.reshape(-1, H))
        return of_hidden[: ids.size].reshape(hidden.shape).astype(hidden.dtype), of_head

    tokens = layout.tokens
    arguments = tokens, layout.head, tokens, tokens, PartitionSpec()
    run = layout.on_each_device(local, arguments, (tokens, layout.head))
    gradient = ScoreGradient.of(sums, cotangents, temperature)
    return *run(hidden, head, ids, gradient, temperature), None, None


def _instantiated(cotangent: Array | SymbolicZero) -> Array:
    if isinstance(cotangent, SymbolicZero):
        return jnp.zeros(cotangent.shape, cotangent.dtype)
    return cotangent


tiled_stats.defvjp(_forward, _backward, symbolic_zeros=True)


class _TokenTiles(NamedTuple):
    """A device's tokens, cut into tiles."""

    hidden: Float[Array, "tiles n H"]
    ids: Int[Array, "tiles n"]
    gradient: ScoreGradient


class _HeadSlice(NamedTuple):
    rows: Float[Array, "v H"]
    start: Int[Array, ""]
    """Index of row 0 within the device's part of the vocabulary."""
    first_new: Int[Array, ""]
    """First row that no earlier slice covered."""


def _slice_gradients(
    cut: _TokenTiles,
    slice_: _HeadSlice,
    of_hidden: Float[Array, "tiles n H"],
    temperature: Number,
    tiles: Tiles,
) -> tuple[Float[Array, "tiles n H"], Float[Array, "v H"]]:
    """Adds a slice's part to the gradient of the hidden states; returns it and the slice's own."""
    rows = slice_.rows
    new = jnp.arange(len(rows)) >= slice_.first_new
    new_rows = jnp.where(new[:, None], rows, 0)

    def add_tile(tile: Array, gradients: tuple[Array, Array]) -> tuple[Array, Array]:
        of_hidden, of_rows = gradients
        hidden, ids, gradient = jax.tree.map(lambda x: x[tile], cut)
        rest = ids - slice_.start, gradient, temperature
        ds = tiles.score_gradient(hidden, rows, *rest)
        of_rows += product("vn,nh->vh", ds, hidden)
        of_tokens = of_hidden[tile] + product("vn,vh->nh", ds, new_rows)
        return jax.lax.dynamic_update_index_in_dim(of_hidden, of_tokens, tile, 0), of_rows

    start = of_hidden, jnp.zeros(rows.shape, jnp.float32)
    return jax.lax.fori_loop(0, len(of_hidden), add_tile, start)


def _cut_tokens(arrays: Any, num_batch_dims: int, most: int) -> Any:
    """Reshapes `[*batch, ...]` to `[tiles, n, ...]`: at least one tile, the last zero-padded."""

    def cut(x: Array) -> Array:
        x = x.reshape(-1, *x.shape[num_batch_dims:])
        n = tile_size(len(x), most)
        tiles = max(1, -(-len(x) // n))
        pads = [(0, tiles * n - len(x))] + [(0, 0)] * (x.ndim - 1)
        return jnp.pad(x, pads).reshape(tiles, n, *x.shape[1:])

    return jax.tree.map(cut, arrays)


def tile_size(total: int, most: int) -> int:
    """Returns the size of about even tiles, as few as `most` allows.

    For a total of 2,049 and at most 2,048 that is 1,152, for two tiles.
    """
    even = even_tile(total, most)
    return min(most, -(-even // STRIP) * STRIP) if total > most else even
