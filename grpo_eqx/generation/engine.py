"""Generation engine: reads each prompt once, then decodes completions in a fixed number of slots.

Each slot decodes one completion at a time, at its own position. As completions end, their slots are
refilled from a queue; once nothing waits and most slots are idle, the live ones are packed into
fewer slots. So no completion waits for the longest one, and only a few shapes are compiled.
"""

import abc
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Integer, Key

from grpo_eqx.common.random_keys import token_keys
from grpo_eqx.generation.routes import Routes
from grpo_eqx.generation.sampling import Sampling, sample_tokens
from grpo_eqx.generation.slots import (
    DecodeState,
    MadeCompletions,
    SlotCounts,
    SlotQueue,
    Slots,
    laid_out_prompts,
)
from grpo_eqx.generation.stopping import Stopping
from grpo_eqx.models.causal_attention import BlockedAttention, CausalAttention
from grpo_eqx.models.interface import CausalLM
from grpo_eqx.models.prompt_cache import PromptCache
from grpo_eqx.sharding.rollout_layout import RolloutLayout

_Tree = TypeVar("_Tree")
FEWEST_SLOTS = 4
MOST_HALVINGS = 3
"""Limits on how far slots are reduced."""
MOST_READ = 2 / 3
"""Largest share of keys and values that a step may still read for slots to be reduced. Each number
of slots is one more loop to compile."""
TOKENS, REFILLS = "decode_tokens", "refill_slots"
"""Scopes of the loops, by which the planner finds them in a compiled program."""


class DecodingForm(abc.ABC):
    """Form of model and prompts that a kind of device decodes fastest; hashable."""

    @abc.abstractmethod
    def __call__(self, model: CausalLM, prompts: PromptCache) -> tuple[CausalLM, PromptCache]:
        """Returns a model and `stored` prompts for `CausalLM.extend`."""

    @abc.abstractmethod
    def num_parts(self, cache_length: int) -> int:
        """Returns the number of parts of a growing cache."""


class Generated(NamedTuple):
    """Completions of `P` prompts, `G` of each. Entries past the end of one mean nothing."""

    ids: Int[Array, "P G Tc"]
    """Tokens, the end-of-sequence token included."""
    logps: Float[Array, "P G Tc"]
    """Log-prob of each token under the distribution it was drawn from."""
    lengths: Int[Array, "P G"]
    """Number of tokens."""
    finished: Bool[Array, "P G"]
    """True where the completion ended by itself, false where the length limit cut it."""
    routes: Routes | None
    """Experts that the model's routers chose, if they are recorded."""
    counts: SlotCounts


class Begun(NamedTuple):
    """Completions before their first token."""

    model: CausalLM
    """In the form that decodes."""
    queue: SlotQueue
    slots: Slots
    routes: Integer[Array, "P Tp Lk"] | None
    """Experts that routers chose for the prompts, of models with experts."""


def begin(
    model: CausalLM,
    prompt_ids: Int[Array | np.ndarray, "P Tp"],
    prompt_mask: Bool[Array | np.ndarray, "P Tp"],
    num_generations: int,
    *,
    max_length: int,
    num_slots: int,
    layout: RolloutLayout | None = None,
    kv_cache_dtype: jnp.dtype | None = None,
    kv_head_multiple: int = 1,
    attention: CausalAttention = BlockedAttention(),
    decoding_form: DecodingForm | None = None,
    records_routes: bool = False,
) -> Begun:
    """Reads prompts, and puts their first completions into slots.

    **Arguments:** as in `generate`, and

    - `num_generations`: completions of each prompt.

    Raises `ValueError` where slots or prompts do not divide evenly among the shards.
    """
    num_shards = 1 if layout is None else layout.num_prompt_shards
    if num_slots < 1 or num_slots % num_shards or len(prompt_ids) % num_shards:
        raise ValueError(f"{num_slots} slots, {len(prompt_ids)} prompts, {num_shards} shards")
    read = model.prefill(
        jnp.asarray(prompt_ids), jnp.asarray(prompt_mask), attention=attention, layout=layout
    )
    cache = read.stored(kv_cache_dtype, kv_head_multiple)
    if layout is not None:
        cache = laid_out_prompts(cache, layout)
    if decoding_form is not None:
        model, cache = decoding_form(model, cache)
    queue = SlotQueue(cache, num_generations, num_shards)
    routes = model.config.routes if records_routes else None
    slots = queue.first_slots(num_slots, max_length, routes)
    return Begun(model, queue, slots if layout is None else slots.laid_out(layout), read.routes)


def generate(
    model: CausalLM,
    prompt_ids: Int[Array | np.ndarray, "P Tp"],
    prompt_mask: Bool[Array | np.ndarray, "P Tp"],
    keys: Key[Array, "P G"],
    *,
    sampling: Sampling,
    max_length: int,
    stopping: Stopping,
    num_slots: int | None = None,
    refill_at: int | None = None,
    layout: RolloutLayout | None = None,
    kv_cache_dtype: jnp.dtype | None = None,
    kv_head_multiple: int = 1,
    attention: CausalAttention = BlockedAttention(),
    decoding_form: DecodingForm | None = None,
    records_routes: bool = False,
) -> Generated:
    """Completes every prompt `G` times; stops early once every completion has ended.

    Apart from rounding, a completion depends neither on the number of slots nor on what its slot
    decoded before.

    **Arguments:**

    - `model`: the weights that sampling reads.
    - `prompt_ids`, `prompt_mask`: the prompts, padded on either side.
    - `keys`: one key per completion, from which token `t` is drawn with `fold_in(key, t)`.
    - `sampling`: how tokens are drawn.
    - `max_length`: limit of a completion's tokens.
    - `stopping`: what ends a completion before that.
    - `num_slots`: completions to decode at a time; by default all.
    - `refill_at`: idle slots in a shard that trigger a refill; by default a sixteenth of its slots.
    - `layout`: the layout over devices, where each shard refills its slots from its own prompts; by
      default a single device.
    - `kv_cache_dtype`: dtype of keys and values; by default the model's.
    - `kv_head_multiple`: multiple up to which zeros follow each stored head.
    - `attention`: attention of the prefill.
    - `decoding_form`: returns the model and the prompts in the form that the devices decode
      fastest; by default as they are.
    - `records_routes`: whether the experts that the model's routers choose are recorded.

    Raises `ValueError` where slots or prompts do not divide evenly among the shards, or where
    `num_slots` or `refill_at` is below 1.
    """
    P, G = keys.shape
    N = P * G
    num_slots = N if num_slots is None else min(num_slots, N)
    if refill_at is not None and refill_at < 1:
        raise ValueError(f"{num_slots} slots, refill_at {refill_at}")
    begun = begin(
        model, prompt_ids, prompt_mask, G,
        max_length=max_length, num_slots=num_slots, layout=layout, kv_cache_dtype=kv_cache_dtype,
        kv_head_multiple=kv_head_multiple, attention=attention, decoding_form=decoding_form,
        records_routes=records_routes,
    )  # fmt: skip
    model, queue, slots = begun.model, begun.queue, begun.slots
    num_shards, routes = queue.num_shards, model.config.routes if records_routes else None
    made = MadeCompletions.of_nothing(N, max_length, routes)
    state = DecodeState(
        slots=slots,
        made=made if layout is None else made.laid_out(layout),
        waiting=queue.bounds()[:-1] + num_slots // num_shards,
        counts=SlotCounts.of_nothing(),
    )
    step = partial(_decode, model, keys.reshape(-1), stopping, sampling, layout)
    if num_slots < N:
        of_shard = num_slots // num_shards
        least = min(of_shard, refill_at_least(of_shard) if refill_at is None else refill_at)
        state = _run_queue(state, step, queue, least)
    sizes = [num_slots]
    if layout is None or layout.num_shards == 1:  # else caches would move across devices
        sizes = _sizes(state.slots)
    for size, smaller in zip(sizes, [*sizes[1:], 0], strict=True):
        if size < num_slots:
            order = jnp.argsort(~state.slots.live.reshape(-1), stable=True)[:size]
            state = state._replace(slots=state.slots.packed(order), made=state.saved())
        state = _run(state, step, smaller)
    made = jax.tree.map(lambda x: x.reshape(P, G, *x.shape[1:]), state.saved())
    chosen = made.routes
    if chosen is not None:
        assert begun.routes is not None
        chosen = Routes(begun.routes, chosen)
    return Generated(made.ids, made.logps, made.lengths, made.finished, chosen, state.counts)


def refill_at_least(num_slots: int) -> int:
    """Returns how many idle slots, of those of a shard, trigger a refill by default."""
    return max(1, num_slots // 16)


def _sizes(slots: Slots) -> list[int]:
    """Returns the successive numbers of slots to decode in: halved wherever that pays.

    The slots of a row read their shared prompt once; packed slots each read their own copy.
    """
    (R, W), S = slots.completion.shape, slots.cache_length
    Tp = slots.prompt.visible.shape[1]
    sizes, read = [R * W], R * Tp + R * W * S
    for halvings in range(1, MOST_HALVINGS + 1):
        size = R * W >> halvings
        if size >= FEWEST_SLOTS and size * (Tp + S) <= MOST_READ * read:
            sizes.append(size)
            read = size * (Tp + S)
    return sizes


def _run(
    state: DecodeState,
    step: Callable[[DecodeState], DecodeState],
    until: int,
) -> DecodeState:
    """Decodes until no more than `until` slots are live."""

    def unfinished(state: DecodeState) -> Bool[Array, ""]:
        return jnp.sum(state.slots.live) > until

    with jax.named_scope(TOKENS):
        return jax.lax.while_loop(unfinished, step, state)


def _run_queue(
    state: DecodeState, step: Callable[[DecodeState], DecodeState], queue: SlotQueue, least: int
) -> DecodeState:
    """Decodes until nothing waits; `least` idle slots in a shard trigger a refill of all shards."""

    def waiting(state: DecodeState) -> Bool[Array, " shards"]:
        return state.waiting < queue.bounds()[1:]

    def no_refill_is_due(state: DecodeState) -> Bool[Array, ""]:
        idle = (~state.slots.live).reshape(queue.num_shards, -1).sum(axis=1)
        return ~jnp.any((idle >= least) & waiting(state))

    # Nested loops, not a conditional in one, whose branches would copy the cache at every token.
    def decode_and_refill(state: DecodeState) -> DecodeState:
        with jax.named_scope(TOKENS):
            state = jax.lax.while_loop(no_refill_is_due, step, state)
        return queue.refilled(state)

    with jax.named_scope(REFILLS):
        return jax.lax.while_loop(lambda state: waiting(state).any(), decode_and_refill, state)


def _decode(
    model: CausalLM,
    keys: Key[Array, " rows"],
    stopping: Stopping,
    sampling: Sampling,
    layout: RolloutLayout | None,
    state: DecodeState,
) -> DecodeState:
    """Decodes one token in every slot."""
    slots, counts = decode_token(model, keys, stopping, sampling, layout, state.slots, state.counts)
    return state._replace(slots=slots, counts=counts)


def decode_token(
    model: CausalLM,
    keys: Key[Array, " rows"],
    stopping: Stopping,
    sampling: Sampling,
    layout: RolloutLayout | None,
    slots: Slots,
    counts: SlotCounts,
    *,
    by_row: bool = False,
    starts: Int[Array, " rows"] | None = None,
) -> tuple[Slots, SlotCounts]:
    """Decodes one token in every slot.

    **Arguments:**

    - `model`: the weights, in the form that decodes.
    - `keys`: the key of each completion.
    - `stopping`, `sampling`: what ends a completion, and how tokens are drawn.
    - `layout`: the layout over devices.
    - `slots`, `counts`: the slots, and the counts so far.
    - `by_row`: whether lengths differ so much that attention reads the caches row by row.
    - `starts`: tokens of each completion before the one that is first in its address; by default 0.
    """
    slots = slots if layout is None else slots.laid_out(layout)
    position = _by_slot(slots.length, layout)
    num_written = jnp.where(slots.live, slots.length + 1, 0)
    if not by_row:
        num_written = jnp.maximum(jnp.max(num_written), 1)
    read = model.extend(
        slots.prompt, slots.cache, slots.inputs[..., None], position, num_written, layout
    )
    logits = model.project_logits(read.hidden[:, :, 0])
    routes = None if read.routes is None else read.routes[:, :, 0]
    for sharding in [] if layout is None else layout.logits(logits.shape):
        logits = jax.lax.with_sharding_constraint(logits, sharding)
    places = slots.length if starts is None else slots.length - starts[slots.completion]
    draws = token_keys(keys[slots.completion], places)
    drawn = _by_slot(sample_tokens(logits, draws, sampling), layout)
    stopped = stopping.advance(slots.stop_state, drawn[0])
    slots = slots.after(*drawn, *stopped, read.own, routes, layout)
    if layout is not None:
        slots = slots.laid_out(layout)
    return slots, counts.after(slots, num_written)


def _by_slot(tree: _Tree, layout: RolloutLayout | None) -> _Tree:
    """Constrains arrays `[R, W]` to the layout of the slots.

    Tokens are drawn in a layout of their own. Without constraints on either side, the compiler uses
    it for whatever it can, and sends keys, values and positions back and forth.
    """
    if layout is None:
        return tree
    return jax.lax.with_sharding_constraint(tree, layout.sharding(layout.prompts, layout.groups))
