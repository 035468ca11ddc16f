"""Programs of completions of several turns: decoding that pauses, and reading what others wrote."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from grpo_eqx.generation.engine import TOKENS, decode_token
from grpo_eqx.generation.sampling import Sampling
from grpo_eqx.generation.slots import SlotCounts, Slots
from grpo_eqx.generation.stopping import Stopping
from grpo_eqx.models.interface import CausalLM
from grpo_eqx.sharding.rollout_layout import RolloutLayout

MOST_STEPS = 32
"""Limit on the tokens that slots decode between two pauses."""
TOKENS_AT_ONCE = 16
"""Tokens that a slot reads at once of what others wrote. Where such a run is cut depends on the run
alone: with other cuts, results would round otherwise."""


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
    stopping: Stopping,
    sampling: Sampling,
    layout: RolloutLayout | None,
    pause_after: Int[Array, ""],
) -> tuple[Slots, Report]:
    """Decodes until enough turns have ended, but no more than `MOST_STEPS` tokens.

    **Arguments:**

    - `model`: the weights, in the form that decodes.
    - `slots`: the slots.
    - `keys`: the key of each completion.
    - `stopping`, `sampling`: what ends a turn, and how tokens are drawn.
    - `layout`: the layout over devices.
    - `pause_after`: number of ended turns after which it pauses.
    """
    before = slots

    def goes_on(carry: tuple[Slots, SlotCounts]) -> Bool[Array, ""]:
        slots, counts = carry
        ended = jnp.sum(before.live & ~slots.live)
        return (counts.steps < MOST_STEPS) & slots.live.any() & (ended < pause_after)

    def step(carry: tuple[Slots, SlotCounts]) -> tuple[Slots, SlotCounts]:
        return decode_token(model, keys, stopping, sampling, layout, *carry)

    with jax.named_scope(TOKENS):
        slots, counts = jax.lax.while_loop(goes_on, step, (slots, SlotCounts.of_nothing()))
    places = before.length[..., None] + jnp.arange(MOST_STEPS)
    places = jnp.minimum(places, slots.ids.shape[-1] - 1)
    ids, logps = (jnp.take_along_axis(x, places, axis=-1) for x in (slots.ids, slots.logps))
    return slots, Report(slots.live, slots.length, slots.finished, ids, logps, counts)


def read_tokens(
    model: CausalLM,
    slots: Slots,
    ids: Int[Array, "R W n"],
    lengths: Int[Array, "R W"],
    resumes: Bool[Array, "R W"],
    layout: RolloutLayout | None,
) -> Slots:
    """Returns the slots with tokens that their completions continue with, whoever wrote them.

    **Arguments:**

    - `model`: the weights, in the form that decodes.
    - `slots`: the slots.
    - `ids`: the tokens.
    - `lengths`: number of tokens of each slot, the first of `ids`; live slots have none.
    - `resumes`: slots that decode from there on, with a new turn.
    - `layout`: the layout over devices.
    """
    if layout is not None:
        slots = slots.laid_out(layout)
    num_written = jnp.max(jnp.where(lengths > 0, slots.length + lengths, 0))
    # The last token is left to the next call, as that of a prompt is.
    inputs = jnp.concatenate([slots.inputs[..., None], ids[..., :-1]], axis=-1)
    read = model.extend(
        slots.prompt, slots.cache, inputs, slots.length, num_written, layout, lengths
    )
    last = jnp.take_along_axis(ids, jnp.maximum(lengths - 1, 0)[..., None], axis=-1)[..., 0]
    slots = slots._replace(
        live=slots.live | resumes,
        length=slots.length + lengths,
        inputs=jnp.where(lengths > 0, last, slots.inputs),
        stop_state=jnp.where(resumes, 0, slots.stop_state),
        finished=slots.finished & ~resumes,
        cache=read.own,
    )
    return slots if layout is None else slots.laid_out(layout)
