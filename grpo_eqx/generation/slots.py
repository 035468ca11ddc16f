"""Slots that decode completions, and the queue from which they are refilled.

Each slot decodes one completion at a time, at its own position.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Integer

from grpo_eqx.models.kv_cache import CACHE_BLOCK, GrowingCache, positions_read
from grpo_eqx.models.prompt_cache import PromptCache
from grpo_eqx.sharding.rollout_layout import RolloutLayout
from grpo_eqx.sharding.rules import last_dim_sharding


class MadeCompletions(NamedTuple):
    """Completions as they were when slots were last refilled or packed: one row each."""

    ids: Int[Array, "rows Tc"]
    logps: Float[Array, "rows Tc"]
    lengths: Int[Array, " rows"]
    finished: Bool[Array, " rows"]
    routes: Integer[Array, "rows Tc Lk"] | None

    @classmethod
    def of_nothing(
        cls, num_completions: int, max_length: int, routes: jax.ShapeDtypeStruct | None = None
    ) -> "MadeCompletions":
        return cls(
            ids=jnp.zeros((num_completions, max_length), jnp.int32),
            logps=jnp.zeros((num_completions, max_length), jnp.float32),
            lengths=jnp.zeros(num_completions, jnp.int32),
            finished=jnp.zeros(num_completions, bool),
            routes=_nothing((num_completions, max_length), routes),
        )

    def laid_out(self, layout: RolloutLayout) -> "MadeCompletions":
        """Returns the completions with routes split by layer over all devices.

        Slots put rows anywhere; of what they put, routes alone are large.
        """
        if self.routes is None:
            return self
        sharding = last_dim_sharding(layout.mesh, self.routes.shape)
        return self._replace(routes=jax.lax.with_sharding_constraint(self.routes, sharding))


class Slots(NamedTuple):
    """`R` rows of `W` slots; the slots of a row share its prompt."""

    prompt: PromptCache
    """The rows' prompts."""
    completion: Int[Array, "R W"]
    """Row of `MadeCompletions` that each slot fills."""
    live: Bool[Array, "R W"]
    """False once the completion is done: the slot is idle."""
    length: Int[Array, "R W"]
    """Number of tokens decoded so far."""
    inputs: Int[Array, "R W"]
    """Last token; initially the prompt's last token."""
    stop_state: Int[Array, "R W"]
    """State of the `Stopping` automaton after the decoded tokens."""
    ids: Int[Array, "R W Tc"]
    """Tokens decoded so far. Slots hold them until they are refilled or packed, so that nothing is
    sent between devices for each token."""
    logps: Float[Array, "R W Tc"]
    finished: Bool[Array, "R W"]
    """True where the completion ended by itself."""
    routes: Integer[Array, "R W Tc Lk"] | None
    """Experts of the inputs so far, if they are recorded."""
    cache: list[GrowingCache]
    """Keys and values of the inputs so far, for each stack of layers."""

    @classmethod
    def of_prompts(
        cls,
        prompt: PromptCache,
        completion: Int[Array, "R W"],
        max_length: int,
        routes: jax.ShapeDtypeStruct | None = None,
    ) -> "Slots":
        """Creates slots at the start of completions of the rows' prompts.

        **Arguments:**

        - `prompt`: the prompts of the rows.
        - `completion`: the completions.
        - `max_length`: tokens of the longest completion.
        - `routes`: shape of the experts of a token, if they are recorded.
        """
        assert isinstance(prompt.kv, list)
        R, W = completion.shape
        zeros = jnp.zeros((R, W), jnp.int32)

        return cls(
            prompt=prompt,
            completion=completion,
            live=jnp.ones((R, W), bool),
            length=zeros,
            inputs=jnp.broadcast_to(prompt.last_ids[:, None], (R, W)).astype(jnp.int32),
            stop_state=zeros,
            ids=jnp.zeros((R, W, max_length), jnp.int32),
            logps=jnp.zeros((R, W, max_length), jnp.float32),
            finished=jnp.zeros((R, W), bool),
            routes=_nothing((R, W, max_length), routes),
            cache=[each.growing(R, W, cache_length_of(max_length)) for each in prompt.kv],
        )

    @property
    def cache_length(self) -> int:
        return self.cache[0].length

    def after(
        self,
        tokens: Int[Array, "R W"],
        logps: Float[Array, "R W"],
        stop_state: Int[Array, "R W"],
        ended: Bool[Array, "R W"],
        cache: list[GrowingCache],
        routes: Integer[Array, "R W Lk"] | None,
        layout: RolloutLayout | None,
    ) -> "Slots":
        """Returns the slots with one more token in those that are live.

        **Arguments:**

        - `tokens`, `logps`: the tokens, and their log-probs.
        - `stop_state`, `ended`: states of `Stopping` after the tokens, and whether it ends each
          completion.
        - `cache`: the caches, with the keys and values of the inputs.
        - `routes`: experts of the inputs.
        - `layout`: the layout over devices.
        """
        T = self.ids.shape[-1]

        def write(made: Array, new: Array, place: Array) -> Array:
            R, W = place.shape
            return made.at[jnp.arange(R)[:, None], jnp.arange(W), place].set(new, mode="drop")

        if layout is not None:
            row = layout.prompts, layout.groups
            write = layout.on_each_device(write, [row, row, row], row)
        place = jnp.where(self.live, self.length, T)  # past the end, nothing is written
        length = self.length + self.live
        recorded = self.routes
        if recorded is not None and routes is not None:
            recorded = write(recorded, routes, place)
        return self._replace(
            live=self.live & ~ended & (length < T),
            length=length,
            inputs=jnp.where(self.live, tokens, self.inputs),
            stop_state=stop_state,
            ids=write(self.ids, tokens, place),
            logps=write(self.logps, logps, place),
            finished=self.finished | (self.live & ended),
            routes=recorded,
            cache=cache,
        )

    def laid_out(self, layout: RolloutLayout) -> "Slots":
        """Returns the slots with rows sharded as prompts, and the slots of each row as groups."""
        return jax.lax.with_sharding_constraint(self, self.shardings(layout))

    def shardings(self, layout: RolloutLayout) -> Any:
        """Returns the tree of `laid_out` slots, with a sharding for each array."""
        by_slot = layout.sharding(layout.prompts, layout.groups)
        heads = layout.heads(self.cache[0].parts[0].values.shape[3])
        of_cache = layout.sharding((), layout.prompts, layout.groups, heads)
        shardings = jax.tree.map(lambda x: by_slot, self)
        return shardings._replace(
            prompt=prompt_shardings(self.prompt, layout),
            cache=jax.tree.map(lambda x: of_cache, self.cache),
        )

    def packed(self, order: Int[Array, " n"]) -> "Slots":
        """Returns the slots at the flat indices `order`, one per row."""
        rows = order // self.completion.shape[1]

        def pick(x: Array) -> Array:
            return x.reshape(-1, 1, *x.shape[2:])[order]

        def pick_cache(x: Array) -> Array:
            return x.reshape(len(x), -1, 1, *x.shape[3:])[:, order]

        return Slots(
            prompt=self.prompt.picked(rows[None]),
            **{name: jax.tree.map(pick, getattr(self, name)) for name in self._fields[1:-1]},
            cache=jax.tree.map(pick_cache, self.cache),
        )


class SlotCounts(NamedTuple):
    """Counts of the work done by decoding."""

    steps: Int[Array, ""]
    """Number of decoding steps; each yields a token for every live slot."""
    slots: Int[Array, ""]
    """Number of slots summed over those steps, including idle ones."""
    cache_share: Float[Array, ""]
    """Share of the slots' caches that attention reads, summed over those slots and steps."""

    @classmethod
    def of_nothing(cls) -> "SlotCounts":
        """Returns the counts before the first step."""
        return cls(jnp.int32(0), jnp.int32(0), jnp.float32(0))

    def after(self, slots: Slots, num_written: Int[Array, ""] | Int[Array, "R 1"]) -> "SlotCounts":
        """Adds a step in which attention reads the caches up to `num_written` positions."""
        length, number = slots.cache_length, slots.completion.size
        share = number / length * jnp.mean(positions_read(num_written, length))
        return SlotCounts(self.steps + 1, self.slots + number, self.cache_share + share)


class DecodeState(NamedTuple):
    slots: Slots
    made: MadeCompletions
    waiting: Int[Array, " shards"]
    """First of each shard's completions that no slot has taken."""
    counts: SlotCounts

    def saved(self) -> MadeCompletions:
        """Returns the completions that were made, with those in the slots as far as they are."""
        rows = self.slots.completion.reshape(-1)

        def put(made: Array, here: Array) -> Array:
            return made.at[rows].set(here.reshape(-1, *made.shape[1:]))

        slots = self.slots
        here = MadeCompletions(slots.ids, slots.logps, slots.length, slots.finished, slots.routes)
        return jax.tree.map(put, self.made, here)


class SlotQueue(NamedTuple):
    """Completions in order, with the caches of their prompts."""

    prompts: PromptCache
    group: int
    num_shards: int
    """Number of equal parts that completions, and likewise the slots, are split into."""

    def bounds(self) -> Int[Array, " shards_and_1"]:
        """Returns the start of each part, followed by the end of the last one."""
        size = len(self.prompts.last_ids) * self.group // self.num_shards
        return jnp.arange(self.num_shards + 1, dtype=jnp.int32) * size

    def first_slots(
        self, num_slots: int, max_length: int, routes: jax.ShapeDtypeStruct | None = None
    ) -> Slots:
        """Creates slots for the first completions of each part."""
        P = len(self.prompts.last_ids)
        if num_slots == P * self.group:
            # Each group shares a row, so that its prompt is read once.
            completions = jnp.arange(num_slots, dtype=jnp.int32).reshape(P, self.group)
            return Slots.of_prompts(self.prompts, completions, max_length, routes)
        within = jnp.arange(num_slots // self.num_shards, dtype=jnp.int32)
        completions = self.bounds()[:-1, None] + within
        return self.slots_of(completions.reshape(-1), max_length, routes)

    def slots_of(
        self,
        completions: Int[Array, " R"],
        max_length: int,
        routes: jax.ShapeDtypeStruct | None = None,
    ) -> Slots:
        """Creates slots, one per row, for equally many completions of each part.

        Where a number is negative, the slot is idle.
        """
        prompts = self.prompts_of(jnp.maximum(completions, 0))
        slots = Slots.of_prompts(prompts, completions[:, None], max_length, routes)
        return slots._replace(live=slots.live & (completions >= 0)[:, None])

    def prompts_of(self, completions: Int[Array, " R"]) -> PromptCache:
        """Gathers prompts of equally many completions per part; past its end, its last prompt."""
        P, shards = len(self.prompts.last_ids), self.num_shards
        indices = jnp.minimum(completions // self.group, P - 1).reshape(shards, -1)
        within = indices - jnp.arange(shards)[:, None] * (P // shards)
        return self.prompts.picked(jnp.clip(within, 0, P // shards - 1))

    def refilled(self, state: DecodeState) -> DecodeState:
        """Returns the state with waiting completions in its idle slots."""
        idle = ~state.slots.live.reshape(self.num_shards, -1)
        candidates = state.waiting[:, None] + jnp.cumsum(idle, axis=1, dtype=jnp.int32) - 1
        taken = idle & (candidates < self.bounds()[1:, None])
        waiting = state.waiting + taken.sum(axis=1, dtype=jnp.int32)
        slots = self.admitted(state.slots, candidates.reshape(-1), taken.reshape(-1))
        return DecodeState(slots, state.saved(), waiting, state.counts)

    def admitted(
        self, slots: Slots, completions: Int[Array, " R"], taken: Bool[Array, " R"]
    ) -> Slots:
        """Returns the slots, one per row, with completions at their start where `taken` is true."""
        prompts = self.prompts_of(completions)

        def put(new: Array | int, old: Array, axis: int = 0) -> Array:
            where = taken.reshape((1,) * axis + (-1,) + (1,) * (old.ndim - axis - 1))
            return jnp.where(where, new, old)

        return slots._replace(
            prompt=prompts.mapped(put, slots.prompt),
            completion=put(completions[:, None], slots.completion),
            live=put(True, slots.live),
            length=put(0, slots.length),
            inputs=put(prompts.last_ids[:, None], slots.inputs),
            stop_state=put(0, slots.stop_state),
            finished=put(False, slots.finished),
        )


def laid_out_prompts(prompts: PromptCache, layout: RolloutLayout) -> PromptCache:
    """Shards prompts, with their keys and values, over devices as `layout` says."""
    return jax.lax.with_sharding_constraint(prompts, prompt_shardings(prompts, layout))


def prompt_shardings(prompts: PromptCache, layout: RolloutLayout) -> Any:
    """Returns the tree of `laid_out_prompts`, with a sharding for each array."""
    assert isinstance(prompts.kv, list)
    heads = layout.heads(prompts.kv[0].values.shape[3])
    of_keys = layout.sharding((), layout.prompts, (), heads)

    def of(x: Any, axis: int = 0) -> Any:
        return of_keys if axis else layout.sharding(layout.prompts)

    return prompts.mapped(of)


def _nothing(shape: tuple[int, ...], routes: jax.ShapeDtypeStruct | None) -> Array | None:
    return None if routes is None else jnp.zeros((*shape, *routes.shape), routes.dtype)


def cache_length_of(max_length: int) -> int:
    """Rounds a length up to whole blocks of `CACHE_BLOCK`, unless it fits in a single block."""
    if max_length <= CACHE_BLOCK:
        return max_length
    return -(-max_length // CACHE_BLOCK) * CACHE_BLOCK
