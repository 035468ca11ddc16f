"""Programs of completions of several turns: decoding that pauses, and reading what others wrote."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from grpo_eqx.generation.engine import TOKENS, decode_token
from grpo_eqx.generation.sampling import Sampling
from grpo_eqx.generation.slots import SlotCounts, Slots, laid_out_prompts
from grpo_eqx.generation.stopping import Stopping
from grpo_eqx.models.interface import CausalLM
from grpo_eqx.sharding.rollout_layout import RolloutLayout
from grpo_eqx.sharding.rules import num_shards

MOST_STEPS = 32
"""Limit on the tokens that slots decode between two pauses."""
TOKENS_AT_ONCE = 16
"""Tokens that a slot reads at once of what others wrote. Where such a run is cut depends on the run
alone: with other cuts, results would round otherwise."""
CARRIED_AT_ONCE = 128
"""Tokens that a slot reads at once of a completion that another session began."""


class Report(NamedTuple):
    """Results of decoding until it pauses."""

    live: Bool[Array, "R W"]
    lengths: Int[Array, "R W"]
    """Tokens of each completion."""
    finished: Bool[Array, "R W"]
    """True where the turn ended by itself."""
    ids: Int[Array, "R W n"]
    """Tokens that were drawn, as many as the length has grown by."""
    logps: Float[Array, "R W n"]
    """Their log-probs."""
    counts: SlotCounts


def decode_turns(
    model: CausalLM,
    slots: Slots,
    keys: Key[Array, " rows"],
    starts: Int[Array, " rows"],
    stopping: Stopping,
    sampling: Sampling,
    layout: RolloutLayout | None,
    pause_after: Int[Array, ""],
    most_steps: Int[Array, ""],
) -> tuple[Slots, Report]:
    """Decodes until enough turns have ended, but no more than `MOST_STEPS` tokens.

    **Arguments:**

    - `model`: the weights, in the form that decodes.
    - `slots`: the slots.
    - `keys`: the key of each completion.
    - `starts`: tokens of each completion before the one that is first in its address.
    - `stopping`, `sampling`: what ends a turn, and how tokens are drawn.
    - `layout`: the layout over devices.
    - `pause_after`: number of ended turns after which it pauses.
    - `most_steps`: a lower limit on the tokens.
    """
    before, by_row = slots, slots.completion.shape[1] == 1

    def goes_on(carry: tuple[Slots, SlotCounts]) -> Bool[Array, ""]:
        slots, counts = carry
        ended = jnp.sum(before.live & ~slots.live)
        most = jnp.minimum(most_steps, MOST_STEPS)
        return (counts.steps < most) & slots.live.any() & (ended < pause_after)

    def step(carry: tuple[Slots, SlotCounts]) -> tuple[Slots, SlotCounts]:
        return decode_token(
            model, keys, stopping, sampling, layout, *carry, by_row=by_row, starts=starts
        )

    with jax.named_scope(TOKENS):
        slots, counts = jax.lax.while_loop(goes_on, step, (slots, SlotCounts.of_nothing()))
    places = before.length[..., None] + jnp.arange(MOST_STEPS)
    places = jnp.minimum(places, slots.ids.shape[-1] - 1)
    ids, logps = (jnp.take_along_axis(x, places, axis=-1) for x in (slots.ids, slots.logps))
    return slots, Report(slots.live, slots.length, slots.finished, ids, logps, counts)


class Readers(NamedTuple):
    """Slots that read tokens, in rows of their own: equally many of each device."""

    slots: Int[Array, " n"]
    """Number of each slot among those of its device; past the last one, there is nothing to
    read."""
    ids: Int[Array, "n 1 T"]
    """The tokens."""
    lengths: Int[Array, "n 1"]
    """Number of tokens, the first of `ids`."""
    resumes: Bool[Array, "n 1"]
    """True where the slot decodes from there on, with a new turn."""


def num_readers(num_slots: int) -> int:
    """Returns how many slots of a device read at once, of so many."""
    return max(1, num_slots // 8)


def read_tokens(model: CausalLM, slots: Slots, readers: Readers, layout: RolloutLayout) -> Slots:
    """Returns the slots with tokens that their completions continue with, whoever wrote them.

    Keys and values of the readers are copied to rows of their own and back, so that the time
    follows their number, not that of all slots.

    **Arguments:**

    - `model`: the weights, in the form that decodes.
    - `slots`: the slots.
    - `readers`: the slots that read, and what they read.
    - `layout`: the layout over devices.
    """
    slots = slots.laid_out(layout)
    row = layout.prompts + layout.groups
    width = slots.completion.shape[1] // num_shards(layout.mesh, layout.groups)
    of_rows = layout._replace(prompts=row, groups=())
    parts = layout.num_prompt_shards
    prompts = jnp.minimum(readers.slots // width, len(slots.completion) // parts - 1)
    prompts = prompts.reshape(parts, -1)
    heads = layout.heads(slots.cache[0].parts[0].values.shape[3])

    def pick(x: Array, axis: int = 0) -> Array:
        axes, rows = _axes(layout, axis, heads)

        def local(x: Array, slots: Array) -> Array:
            return jnp.expand_dims(_rows(_flat(x, axis), slots, axis), axis + 1)

        return layout.on_each_device(local, [axes, [row]], rows)(x, readers.slots)

    def put(x: Array, new: Array, axis: int = 0) -> Array:
        axes, rows = _axes(layout, axis, heads)

        def local(x: Array, slots: Array, new: Array) -> Array:
            return _with_rows(_flat(x, axis), slots, new.squeeze(axis + 1), axis).reshape(x.shape)

        return layout.on_each_device(local, [axes, [row], rows], axes)(x, readers.slots, new)

    length, last = pick(slots.length), pick(slots.inputs)
    # The last token is left to the next call, as that of a prompt is.
    inputs = jnp.concatenate([last[..., None], readers.ids[..., :-1]], axis=-1)
    read = model.extend(
        laid_out_prompts(slots.prompt.picked(prompts), of_rows),
        jax.tree.map(partial(pick, axis=1), slots.cache),
        inputs,
        length,
        jnp.max(jnp.where(readers.lengths > 0, length + readers.lengths, 0)),
        of_rows,
        readers.lengths,
    )
    ends = jnp.maximum(readers.lengths - 1, 0)[..., None]
    resumes = readers.resumes
    slots = slots._replace(
        live=put(slots.live, pick(slots.live) | resumes),
        length=put(slots.length, length + readers.lengths),
        inputs=put(slots.inputs, jnp.take_along_axis(readers.ids, ends, axis=-1)[..., 0]),
        stop_state=put(slots.stop_state, jnp.where(resumes, 0, pick(slots.stop_state))),
        finished=put(slots.finished, pick(slots.finished) & ~resumes),
        cache=jax.tree.map(partial(put, axis=1), slots.cache, read.own),
    )
    return slots.laid_out(layout)


def _rows(x: Array, places: Int[Array, " n"], axis: int) -> Array:
    """Returns rows of `axis`, copied one after the other; for a place past the end, the last.

    Not as a gather, for which XLA for TPUs first copies all rows.
    """

    def copy(i: Int[Array, ""], rows: Array) -> Array:
        row = jax.lax.dynamic_slice_in_dim(x, places[i], 1, axis)
        return jax.lax.dynamic_update_slice_in_dim(rows, row, i, axis)

    rows = jnp.zeros((*x.shape[:axis], len(places), *x.shape[axis + 1 :]), x.dtype)
    return jax.lax.fori_loop(0, len(places), copy, rows)


def _with_rows(x: Array, places: Int[Array, " n"], rows: Array, axis: int) -> Array:
    """Replaces rows of `axis`, one after the other; a place past the end replaces nothing.

    Not as a scatter that drops such places: where `x` is cut from a larger array, as a device's
    part of what all hold, XLA for CPUs writes what follows that part into its last row.
    """
    last = x.shape[axis] - 1

    def replace(i: Int[Array, ""], x: Array) -> Array:
        place = jnp.minimum(places[i], last)
        old, new = (
            jax.lax.dynamic_slice_in_dim(of, at, 1, axis) for of, at in ((x, place), (rows, i))
        )
        row = jnp.where(places[i] <= last, new, old)
        return jax.lax.dynamic_update_slice_in_dim(x, row, place, axis)

    return jax.lax.fori_loop(0, len(places), replace, x)


def _axes(
    layout: RolloutLayout, axis: int, heads: tuple[str, ...]
) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    """Returns the mesh axes of an array of slots, whose rows are at `axis`, and of readers."""
    row = layout.prompts + layout.groups
    if axis == 0:
        return [layout.prompts, layout.groups], [row]
    return [(), layout.prompts, layout.groups, heads], [(), row, (), heads]


def _flat(x: Array, axis: int) -> Array:
    """Joins the rows of slots, at `axis`, and the slots of each row."""
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
