"""Rows: trajectories as the device programs take them, in one shape whatever their lengths.

They are written on the host. Each device is sent its own rows, and no others.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Shaped

from grpo_eqx.data.trajectory import Group
from grpo_eqx.models.causal_attention import Visible
from grpo_eqx.sharding.arrays import nowhere, shard
from grpo_eqx.sharding.rules import BATCH_AXES
from grpo_eqx.training.micro_batches import RowShape
from grpo_eqx.training.packing import Packing


class RouteSource(NamedTuple):
    """Where the routes of each column are among those of a rollout (`Routes`)."""

    prompts: Int[Array | np.ndarray, "*M R W"]
    prompt_offsets: Int[Array | np.ndarray, "*M R W"]
    """Token of the prompt."""
    completions: Int[Array | np.ndarray, "*M R W"]
    """Number of the completion in the rollout; -1 on prompts and padding."""
    offsets: Int[Array | np.ndarray, "*M R W"]
    """Token of the completion that the column predicts."""


class Counts(NamedTuple):
    """Counts over the whole batch of an update, float32."""

    sequences: Float[Array | np.ndarray, ""]
    """Completions."""
    filled_sequences: Float[Array | np.ndarray, ""]
    """Completions with any token that counts."""
    tokens: Float[Array | np.ndarray, ""]
    """Tokens that count."""
    tokens_per_update: Float[Array | np.ndarray, ""]
    """Tokens of the whole rollout that count, divided by the updates that share it; at least 1 in
    all."""


class Rows(eqx.Module):
    """`M` micro-batches of `R` rows of `W` tokens, `S` of them to score, with `C` completions.

    See `Packing` for what a row holds. A micro-batch (`micro_batch`) lacks the first dim. Only
    updates read `counts`, `advantages`, `counted` and the scores.
    """

    ids: Int[Array, "*M R W"]
    """Tokens that the model reads."""
    positions: Int[Array, "*M R W"]
    """Positions of the tokens in their sequences."""
    visible: Visible
    """Columns that each column sees."""
    is_completion: Bool[Array, "*M R W"]
    """True on the columns that predict a token of a completion."""
    scored: Int[Array, "*M R S"]
    """Column that predicts each token; 0 for padding."""
    targets: Int[Array, "*M R S"]
    """Tokens to score; -1 for padding."""
    sampler_logps: Float[Array, "*M R S"]
    scored_starts: Int[Array, "*M R C"]
    """Start of each completion's tokens among those that are scored."""
    lengths: Int[Array, "*M R C"]
    """Tokens of each completion; 0 where the place is empty."""
    number: Int[Array, ""] | np.int32
    """Micro-batches in use, the first ones: at most `M`."""
    shape: RowShape = eqx.field(static=True)
    route_source: RouteSource | None = None
    """`None`: no routes are replayed."""
    counts: Counts | None = None
    advantages: Float[Array, "*M R C"] | None = None
    counted: Bool[Array, "*M R S"] | None = None
    """True on the tokens that the loss counts."""
    old_logps: Float[Array, "*M R S"] | None = None
    """Log-probs under the policy that ratios are relative to. `None`: the policy being updated, so
    that ratios are exactly 1 and no extra forward pass is needed."""
    ref_logps: Float[Array, "*M R S"] | None = None
    """Log-probs under the reference model, for the KL term."""
    entropies: Float[Array, "*M R S"] | None = None
    """Entropies of the policy being updated, needed if only high-entropy tokens count."""

    def micro_batch(self, index: Int[Array, ""]) -> "Rows":
        """Returns one of the micro-batches."""

        def one(x: Array | np.generic) -> Array | np.generic:
            return jax.lax.dynamic_index_in_dim(x, index, keepdims=False) if x.ndim else x

        return jax.tree.map(one, self)

    def without_loss(self) -> "Rows":
        """Returns what a forward pass reads."""
        return dataclasses.replace(
            self, counts=None, advantages=None, counted=None,
            old_logps=None, ref_logps=None, entropies=None,
        )  # fmt: skip

    def without_routes(self) -> "Rows":
        """Returns the rows of which no router's choice is replayed."""
        return dataclasses.replace(self, route_source=None)

    def by_completion(self, x: Shaped[Array, "R S"]) -> Shaped[Array, "R C T"]:
        """Lays out values of a micro-batch's scored tokens by completion, as the objective does.

        Values past the end of a completion mean nothing.
        """
        columns = self.scored_starts[..., None] + jnp.arange(
            self.shape.completion_length, dtype=jnp.int32
        )
        columns = jnp.minimum(columns, x.shape[1] - 1)
        return jnp.take_along_axis(x[:, None], columns, axis=2)

    def is_token(self) -> Bool[Array, "R C T"]:
        """Returns True on the tokens of a micro-batch's completions, laid out by completion."""
        tokens = jnp.arange(self.shape.completion_length, dtype=jnp.int32)
        return tokens < self.lengths[..., None]


def row_sharding(mesh: jax.sharding.Mesh) -> NamedSharding:
    """Returns the sharding of arrays `[M, R, ...]`: each device has its own rows."""
    return NamedSharding(mesh, PartitionSpec(None, BATCH_AXES))


def pack(
    groups: Sequence[Group],
    packing: Packing,
    mesh: jax.sharding.Mesh,
    route_prompts: Sequence[int] | None = None,
) -> Rows:
    """Writes a batch's trajectories as rows, without what the loss needs besides.

    **Arguments:**

    - `groups`: the trajectories of each prompt.
    - `packing`: the assignment of their completions to rows.
    - `mesh`: the devices.
    - `route_prompts`: where routes are replayed, the number of each prompt in the rollout.
    """
    fields = _sharded_rows(
        packing, mesh, lambda rows: _written(groups, packing, rows, route_prompts)
    )
    return Rows(
        **fields,
        number=np.int32(packing.number),
        shape=packing.shape,
    )


def with_loss(
    rows: Rows,
    packing: Packing,
    mesh: jax.sharding.Mesh,
    counted: Sequence[Bool[np.ndarray, " _"]],
    advantages: Float[np.ndarray, " N"],
    tokens_per_update: float | None = None,
    **scores: Float[Array, "M R S"],
) -> Rows:
    """Adds what the loss needs to packed rows.

    **Arguments:**

    - `rows`, `packing`, `mesh`: the rows, how they were packed, and the devices.
    - `counted`: for each completion, True on the tokens that the loss counts.
    - `advantages`: those of the completions.
    - `tokens_per_update`: tokens of the whole rollout that count, over the updates that share it;
      by default the tokens of these rows.
    - `scores`: any of `old_logps`, `ref_logps` and `entropies`.
    """
    filled = [int(mask.sum()) for mask in counted]
    if tokens_per_update is None:
        tokens_per_update = max(sum(filled), 1)
    num_filled = sum(number > 0 for number in filled)
    numbers = len(filled), num_filled, sum(filled), tokens_per_update
    return dataclasses.replace(
        rows,
        counts=Counts(*(np.asarray(x, np.float32) for x in numbers)),
        advantages=place_values(advantages.astype(np.float32), packing, mesh),
        counted=place_tokens(counted, packing, mesh),
        **scores,  # type: ignore[arg-type]
    )


def place_tokens(
    values: Sequence[Shaped[np.ndarray, " _"]],
    packing: Packing,
    mesh: jax.sharding.Mesh,
) -> Shaped[Array, "M R S"]:
    """Lays out an array for each completion among the tokens that are scored; 0 elsewhere."""

    def write(rows: slice) -> np.ndarray:
        R, S = rows.stop - rows.start, packing.shape.num_scored
        out = np.zeros((packing.shape.most_micro_batches, R, S), values[0].dtype)
        for m, r, _, number, length, *_, first in _held(packing, rows):
            out[m, r, first : first + length] = values[number]
        return out

    return _sharded_rows(packing, mesh, write)


def take_tokens(
    x: Shaped[np.ndarray, "M R S *rest"], packing: Packing
) -> list[Shaped[np.ndarray, "_ *rest"]]:
    """Returns the values of each completion's tokens: undoes `place_tokens`, on the host."""
    values = [x[0, 0, :0]] * packing.num_completions
    for m, r, _, number, length, *_, first in _held(packing, slice(0, packing.shape.num_rows)):
        values[number] = x[m, r, first : first + length]
    return values


def place_values(
    values: Shaped[np.ndarray, " N"], packing: Packing, mesh: jax.sharding.Mesh
) -> Shaped[Array, "M R C"]:
    """Lays out a value for each completion; 0 at places without one."""
    held = np.where(packing.completions < 0, 0, values[np.maximum(packing.completions, 0)])
    return shard(held.astype(values.dtype), row_sharding(mesh))


def shapes_of_rows(
    shape: RowShape, mesh: jax.sharding.Mesh, *, replays: bool, of_loss: Sequence[str] | None
) -> Rows:
    """Returns the shapes of packed rows.

    **Arguments:**

    - `shape`, `mesh`: the shape of the rows, and the devices.
    - `replays`: whether routes are replayed.
    - `of_loss`: of an update's rows, which of `old_logps`, `ref_logps` and `entropies` they have;
      `None` for the rows of a score.
    """
    M, R = shape.most_micro_batches, shape.num_rows

    def rows() -> Rows:
        columns, scored, places = (
            jnp.zeros((M, R, size), jnp.int32)
            for size in (shape.width, shape.num_scored, shape.places)
        )
        floats = scored.astype(jnp.float32)
        packed = Rows(
            ids=columns, positions=columns, visible=Visible(columns, columns, columns),
            is_completion=columns > 0, scored=scored, targets=scored, sampler_logps=floats,
            scored_starts=places, lengths=places, number=jnp.int32(0), shape=shape,
            route_source=RouteSource(*[columns] * 4) if replays else None,
        )  # fmt: skip
        if of_loss is None:
            return packed
        scores: dict[str, Any] = dict.fromkeys(of_loss, floats)
        return dataclasses.replace(
            packed,
            counts=Counts(*[jnp.float32(0)] * 4),
            advantages=places.astype(jnp.float32),
            counted=scored > 0,
            **scores,
        )

    def sharded(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        if not x.ndim:
            return x
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=row_sharding(mesh))

    return jax.tree.map(sharded, jax.eval_shape(rows))


def _sharded_rows(packing: Packing, mesh: jax.sharding.Mesh, write: Callable[[slice], Any]) -> Any:
    """Writes the rows of this process's devices, and sends each device its own.

    **Arguments:**

    - `packing`, `mesh`: the assignment of completions to rows, and the devices.
    - `write`: a function that writes arrays `[M, r, ...]` of `r` consecutive rows of every
      micro-batch; it returns a tree of them.
    """
    sharding, R = row_sharding(mesh), packing.shape.num_rows
    shape = packing.shape.most_micro_batches, R

    def bounds(index: tuple[slice, ...] | None) -> tuple[int, int]:
        assert index is not None
        return index[1].indices(R)[:2]

    own = set(map(bounds, sharding.addressable_devices_indices_map(shape).values()))
    # A process without any still has to know the shapes.
    blocks = {each: write(slice(*each)) for each in sorted(own) or [(0, 1)]}
    leaves = {each: jax.tree.leaves(block) for each, block in blocks.items()}
    first, *_ = blocks.values()

    def sent(i: int, like: np.ndarray) -> Array:
        dtype = jax.dtypes.canonicalize_dtype(like.dtype)
        whole = jax.ShapeDtypeStruct((*shape, *like.shape[2:]), dtype, sharding=sharding)
        if not own:
            return nowhere(whole)
        return jax.make_array_from_callback(
            whole.shape, sharding, lambda index: leaves[bounds(index)][i]
        )

    arrays = [sent(i, like) for i, like in enumerate(jax.tree.leaves(first))]
    return jax.tree.unflatten(jax.tree.structure(first), arrays)


def _held(packing: Packing, rows: slice) -> list[list[int]]:
    """Lists the completions in some rows.

    **Returns:** for each completion its micro-batch, row, place in the row and number; its length;
    its first column and that of its prompt; the number of the prompt's tokens; and the place of
    the completion's first token among the scored ones.
    """
    places = np.argwhere(packing.completions[:, rows] >= 0)
    fields = (
        packing.completions, packing.lengths, packing.starts, packing.prompt_starts,
        packing.prompt_lengths, packing.scored_starts,
    )  # fmt: skip
    picked = [x[:, rows][tuple(places.T)] for x in fields]
    return np.concatenate([places, np.stack(picked, axis=1)], axis=1).tolist()


def _written(
    groups: Sequence[Group],
    packing: Packing,
    rows: slice,
    route_prompts: Sequence[int] | None,
) -> dict[str, Any]:
    """Writes the fields of `Rows` for some rows of every micro-batch."""
    shape, flat = packing.shape, [each for group in groups for each in group]
    M, R = shape.most_micro_batches, rows.stop - rows.start
    columns = np.arange(shape.width, dtype=np.int32)

    def nothing(size: int, dtype: type = np.int32) -> np.ndarray:
        return np.zeros((M, R, size), dtype)

    # Padding repeats the first token of the row's first prompt, whose experts exist.
    padding = np.maximum(packing.completions[:, rows, 0], 0)
    first_ids = np.array([each.prompt_ids[0] for each in flat], np.int32)
    ids = np.repeat(first_ids[padding][..., None], shape.width, axis=-1)
    positions, prompt_start, prompt_end = (nothing(shape.width) for _ in range(3))
    own_start = np.broadcast_to(columns, ids.shape).copy()  # padding sees itself alone
    is_completion = nothing(shape.width, bool)
    scored, targets = nothing(shape.num_scored), nothing(shape.num_scored) - 1
    sampler_logps = nothing(shape.num_scored, np.float32)
    source = None
    G = len(groups[0])  # routes are those of as many completions of each prompt
    if route_prompts is not None:
        source = RouteSource(*(nothing(shape.width) for _ in range(4)))
        source.prompts[:] = np.asarray(route_prompts)[padding // G][..., None]
        source.completions[:] = -1
    for m, r, _, number, length, start, of_prompt, prompt_length, first in _held(packing, rows):
        each, kept = flat[number], prompt_length - 1
        row = m, r
        prompt, own = slice(of_prompt, of_prompt + kept), slice(start, start + length)
        # A prompt without its last token: that is the first input of each of its completions.
        *ids[row][prompt], ids[row][start] = each.prompt_ids
        ids[row][start + 1 : own.stop] = each.ids[:-1]
        positions[row][prompt] = columns[:kept]
        positions[row][own] = kept + columns[:length]
        own_start[row][prompt], own_start[row][own] = of_prompt, start
        prompt_start[row][own], prompt_end[row][own] = of_prompt, prompt.stop
        is_completion[row][own] = True
        tokens = slice(first, first + length)
        scored[row][tokens] = start + columns[:length]
        targets[row][tokens], sampler_logps[row][tokens] = each.ids, each.sampler_logps
        if source is not None and route_prompts is not None:
            p, sample = divmod(number, G)
            of_rollout = route_prompts[p]
            source.prompts[row][prompt] = source.prompts[row][own] = of_rollout
            source.prompt_offsets[row][prompt] = columns[:kept]
            source.prompt_offsets[row][own] = kept
            source.completions[row][own] = of_rollout * G + sample
            source.offsets[row][own] = columns[:length]
    return {
        "ids": ids, "positions": positions,
        "visible": Visible(own_start, prompt_start, prompt_end),  # type: ignore[arg-type]
        "is_completion": is_completion, "scored": scored, "targets": targets,
        "sampler_logps": sampler_logps, "scored_starts": packing.scored_starts[:, rows],
        "lengths": packing.lengths[:, rows], "route_source": source,
    }  # fmt: skip
