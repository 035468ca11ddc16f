"""The rollout: prefill each prompt once, then decode its whole group until all have ended."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from grpo_eqx.generation.rollout import Rollout
from grpo_eqx.generation.sampling import Sampling, sample_tokens
from grpo_eqx.models.layers import KeyValues
from grpo_eqx.models.qwen2 import Qwen2


class _DecodeState(NamedTuple):
    position: Int[Array, ""]
    inputs: Int[Array, "P G"]
    done: Bool[Array, "P G"]
    cache: KeyValues
    ids: Int[Array, "P G Tc"]
    mask: Bool[Array, "P G Tc"]
    logps: Float[Array, "P G Tc"]


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
) -> Rollout:
    """Completes every prompt `G` times; stops early once every completion has ended.

    **Arguments:** prompts padded on either side; one key for each completion, from which token
    `t` is drawn with `fold_in(key, t)`; the ids that end a completion.
    """
    P, G = keys.shape
    prompt = model.prefill(prompt_ids, prompt_mask)
    config = model.config
    cache_shape = (
        config.num_hidden_layers, P, G, config.num_key_value_heads, max_length, config.head_size
    )  # fmt: skip
    cache = KeyValues(*(jnp.zeros(cache_shape, prompt.kv.keys.dtype) for _ in range(2)))
    ends = jnp.asarray(eos_ids, jnp.int32)
    fold_in = jnp.vectorize(jax.random.fold_in, excluded={1})

    def unfinished(state: _DecodeState) -> Bool[Array, ""]:
        return (state.position < max_length) & ~state.done.all()

    def decode(state: _DecodeState) -> _DecodeState:
        index = state.position
        logits, cache = model.decode(prompt, state.cache, state.inputs, index)
        tokens, logps = sample_tokens(logits, fold_in(keys, index), sampling)
        tokens = jnp.where(state.done, pad_id, tokens)
        return _DecodeState(
            index + 1,
            tokens,
            state.done | (tokens[..., None] == ends).any(axis=-1),
            cache,
            state.ids.at[..., index].set(tokens),
            state.mask.at[..., index].set(~state.done),
            state.logps.at[..., index].set(jnp.where(state.done, 0.0, logps)),
        )

    state = _DecodeState(
        position=jnp.zeros((), jnp.int32),
        inputs=jnp.broadcast_to(prompt.last_ids[:, None], (P, G)).astype(jnp.int32),
        done=jnp.zeros((P, G), bool),
        cache=cache,
        ids=jnp.full((P, G, max_length), pad_id, jnp.int32),
        mask=jnp.zeros((P, G, max_length), bool),
        logps=jnp.zeros((P, G, max_length), jnp.float32),
    )
    state = jax.lax.while_loop(unfinished, decode, state)
    return Rollout(prompt_ids, prompt_mask, state.ids, state.mask, state.logps, state.done)
