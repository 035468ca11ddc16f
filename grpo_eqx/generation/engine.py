"""The rollout: each prompt read once, then a fixed number of slots that decode until all is done.

A slot decodes one completion at a time, each at a position of its own. When completions end, their
slots are refilled from those that wait; when none waits and most slots are idle, the rest moves to
fewer slots. So no completion waits for the longest, and only a few shapes are compiled.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from grpo_eqx.generation.rollout import Rollout
from grpo_eqx.generation.sampling import Sampling, sample_tokens
from grpo_eqx.models.attention import CACHE_BLOCK, KeyValues
from grpo_eqx.models.qwen2 import PromptCache, Qwen2

FEWEST_SLOTS = 4
MOST_HALVINGS = 3
"""How far slots are reduced; each reduction is one more loop to compile."""


def sample_keys(
    seed: int | Int[Array, ""],
    step: Int[Array, ""],
    prompt_indices: Int[Array, " P"],
    num_generations: int,
) -> Key[Array, "P G"]:
    """The key of every completion: a pure function of (seed, step, prompt, sample)."""
    step_key = jax.random.fold_in(jax.random.key(seed), step)

    def of_prompt(index: Int[Array, ""]) -> Key[Array, " G"]:
        key = jax.random.fold_in(step_key, index)
        return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(num_generations))

    return jax.vmap(of_prompt)(prompt_indices)


class _Completions(NamedTuple):
    """What is generated: a row for each completion, and a last one for what idle slots write."""

    ids: Int[Array, "rows Tc"]
    logps: Float[Array, "rows Tc"]
    lengths: Int[Array, " rows"]
    finished: Bool[Array, " rows"]

    @classmethod
    def of_nothing(cls, num_completions: int, max_length: int) -> "_Completions":
        rows = num_completions + 1
        return cls(
            ids=jnp.zeros((rows, max_length), jnp.int32),
            logps=jnp.zeros((rows, max_length), jnp.float32),
            lengths=jnp.zeros(rows, jnp.int32),
            finished=jnp.zeros(rows, bool),
        )


class _Slots(NamedTuple):
    """`R` rows of `W` slots; the slots of a row work on the same prompt."""

    prompt: PromptCache
    """The rows' prompts."""
    completion: Int[Array, "R W"]
    """Which one a slot decodes; the row of nothing where it is idle."""
    place: Int[Array, "R W"]
    """Tokens decoded so far."""
    inputs: Int[Array, "R W"]
    """The last of them, or of the prompt."""
    cache: KeyValues
    """Keys and values of the inputs so far, `[L, R, W, K, S, D]`."""

    @classmethod
    def of_prompts(
        cls, prompt: PromptCache, completion: Int[Array, "R W"], cache_length: int
    ) -> "_Slots":
        """Slots at the start of completions of the rows' prompts."""
        R, W = completion.shape
        L, _, _, K, _, D = prompt.kv.keys.shape
        empty = jnp.zeros((L, R, W, K, cache_length, D), prompt.kv.keys.dtype)
        return cls(
            prompt=prompt,
            completion=completion,
            place=jnp.zeros((R, W), jnp.int32),
            inputs=jnp.broadcast_to(prompt.last_ids[:, None], (R, W)).astype(jnp.int32),
            cache=KeyValues(empty, empty),
        )

    def packed(self, order: Int[Array, " n"]) -> "_Slots":
        """Those slots alone, a row each."""
        rows = order // self.completion.shape[1]

        def pick(x: Array) -> Array:
            return x.reshape(-1, 1)[order]

        def pick_cache(x: Array) -> Array:
            return x.reshape(len(x), -1, 1, *x.shape[3:])[:, order]

        return _Slots(
            prompt=_prompts_of(self.prompt, rows),
            completion=pick(self.completion),
            place=pick(self.place),
            inputs=pick(self.inputs),
            cache=jax.tree.map(pick_cache, self.cache),
        )

    def with_written(self, new: KeyValues) -> KeyValues:
        """The cache with the keys and values of each slot's input."""
        R, W = self.place.shape
        where = jnp.arange(R)[:, None], jnp.arange(W), slice(None), self.place

        def write(cache: Array, token: Array) -> Array:
            token = jnp.moveaxis(token[..., 0, :], 0, 2)
            return cache.at[:, *where].set(token.astype(cache.dtype))

        return jax.tree.map(write, self.cache, new)


class _State(NamedTuple):
    slots: _Slots
    made: _Completions
    waiting: Int[Array, ""]
    """The first completion that no slot has taken."""

    def idle(self) -> Bool[Array, "R W"]:
        return self.slots.completion == len(self.made.lengths) - 1


def generate(
    model: Qwen2,
    prompt_ids: Int[Array, "P Tp"],
    prompt_mask: Bool[Array, "P Tp"],
    keys: Key[Array, "P G"],
    *,
    sampling: Sampling,
    max_length: int,
    eos_ids: Sequence[int],
    pad_id: int,
    num_slots: int | None = None,
    refill_at: int | None = None,
    shrink: bool = True,
) -> Rollout:
    """Completes every prompt `G` times; stops early once every completion has ended.

    Neither the number of slots nor what a slot did before changes a completion.

    **Arguments:** prompts padded on either side; one key for each completion, from which token
    `t` is drawn with `fold_in(key, t)`; the ids that end a completion; how many completions to
    decode at a time (`None`: all); how many idle slots to refill at once (`None`: a sixteenth);
    whether the last ones move to fewer slots, which across devices would move their caches.
    """
    P, G = keys.shape
    N = P * G
    num_slots = N if num_slots is None else min(num_slots, N)
    cache_length = max_length
    if max_length > CACHE_BLOCK:
        cache_length = -(-max_length // CACHE_BLOCK) * CACHE_BLOCK
    prompts = model.prefill(prompt_ids, prompt_mask)
    first = jnp.arange(num_slots, dtype=jnp.int32)
    if num_slots == N:
        # Each group in a row: it reads its prompt once.
        slots = _Slots.of_prompts(prompts, first.reshape(P, G), cache_length)
    else:
        slots = _Slots.of_prompts(_prompts_of(prompts, first // G), first[:, None], cache_length)
    made = _Completions.of_nothing(N, max_length)
    state = _State(slots, made, jnp.int32(num_slots))

    sizes = [num_slots]
    while shrink and sizes[-1] // 2 >= FEWEST_SLOTS and len(sizes) <= MOST_HALVINGS:
        sizes.append(sizes[-1] // 2)
    step = partial(
        _decode,
        model,
        jnp.append(keys.reshape(-1), keys[0, :1]),
        jnp.asarray(eos_ids, jnp.int32),
        sampling,
    )
    for size, smaller in zip(sizes, [*sizes[1:], 0], strict=True):
        if size < num_slots:
            order = jnp.argsort(state.idle().reshape(-1), stable=True)[:size]
            state = state._replace(slots=state.slots.packed(order))
        if size == num_slots < N:
            least = max(1, num_slots // 16) if refill_at is None else refill_at
            state = _run_queue(state, step, partial(_refilled, prompts, G), least)
        state = _run(state, step, smaller)
    return _rollout(prompt_ids, prompt_mask, state.made, (P, G), pad_id)


def _run(
    state: _State,
    step: Callable[[_State], _State],
    until: int,
) -> _State:
    """Decodes until no more than `until` slots are live."""

    def unfinished(state: _State) -> Bool[Array, ""]:
        return jnp.sum(~state.idle()) > until

    return jax.lax.while_loop(unfinished, step, state)


def _run_queue(
    state: _State,
    step: Callable[[_State], _State],
    refill: Callable[[_State], _State],
    least: int,
) -> _State:
    """Decodes until nothing waits, and refills whenever at least so many slots are idle."""

    def waiting(state: _State) -> Bool[Array, ""]:
        return state.waiting < len(state.made.lengths) - 1

    # Two loops and no condition in one, whose branches would copy the cache at every token.
    def decode_and_refill(state: _State) -> _State:
        return refill(jax.lax.while_loop(lambda state: state.idle().sum() < least, step, state))

    return jax.lax.while_loop(waiting, decode_and_refill, state)


def _decode(
    model: Qwen2,
    keys: Key[Array, " rows"],
    ends: Int[Array, " E"],
    sampling: Sampling,
    state: _State,
) -> _State:
    """One token for every slot."""
    slots, made, idle = state.slots, state.made, state.idle()
    nothing, max_length = len(made.ids) - 1, made.ids.shape[1]
    most = jnp.max(jnp.where(idle, 0, slots.place))
    logits, new = model.decode(slots.prompt, slots.cache, slots.inputs, slots.place, most)
    draws = jnp.vectorize(jax.random.fold_in)(keys[slots.completion], slots.place)
    tokens, logps = sample_tokens(logits, draws, sampling)
    length = slots.place + 1
    ended = (tokens[..., None] == ends).any(axis=-1)
    done = ended | (length == max_length)
    made = _Completions(
        ids=made.ids.at[slots.completion, slots.place].set(tokens),
        logps=made.logps.at[slots.completion, slots.place].set(logps),
        lengths=made.lengths.at[slots.completion].set(length),
        finished=made.finished.at[slots.completion].set(ended),
    )
    slots = slots._replace(
        completion=jnp.where(done, nothing, slots.completion),
        # An idle slot stays where it is, so that it never leaves the cache.
        place=jnp.where(idle | done, slots.place, length),
        inputs=tokens,
        cache=slots.with_written(new),
    )
    return _State(slots, made, state.waiting)


def _refilled(prompts: PromptCache, group: int, state: _State) -> _State:
    """Waiting completions in the idle slots."""
    slots, idle = state.slots, state.idle()[:, 0]
    candidates = state.waiting + jnp.cumsum(idle) - 1
    taken = idle & (candidates < len(state.made.lengths) - 1)
    fresh = _prompts_of(prompts, jnp.where(taken, candidates // group, 0))

    def put(new: Array, old: Array, axis: int = 0) -> Array:
        where = taken.reshape((1,) * axis + (-1,) + (1,) * (old.ndim - axis - 1))
        return jnp.where(where, new, old)

    slots = _Slots(
        prompt=PromptCache(
            jax.tree.map(partial(put, axis=1), fresh.kv, slots.prompt.kv),
            *map(put, fresh[1:], slots.prompt[1:]),
        ),
        completion=put(candidates[:, None], slots.completion),
        place=put(jnp.zeros_like(slots.place), slots.place),
        inputs=put(fresh.last_ids[:, None], slots.inputs),
        cache=slots.cache,
    )
    return _State(slots, state.made, state.waiting + taken.sum())


def _prompts_of(prompts: PromptCache, indices: Int[Array, " R"]) -> PromptCache:
    """Those prompts, in that order."""
    kv = jax.tree.map(lambda x: x[:, indices], prompts.kv)
    return PromptCache(kv, *(x[indices] for x in prompts[1:]))


def _rollout(
    prompt_ids: Int[Array, "P Tp"],
    prompt_mask: Bool[Array, "P Tp"],
    made: _Completions,
    shape: tuple[int, int],
    pad_id: int,
) -> Rollout:
    ids, logps, lengths, finished = (x[:-1].reshape(*shape, *x.shape[1:]) for x in made)
    mask = jnp.arange(ids.shape[-1]) < lengths[..., None]
    return Rollout(
        prompt_ids,
        prompt_mask,
        jnp.where(mask, ids, pad_id),
        mask,
        jnp.where(mask, logps, 0.0),
        finished,
    )
