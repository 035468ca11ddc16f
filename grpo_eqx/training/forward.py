"""Forward pass over completed rollouts."""

import equinox as eqx
import jax
import jax.numpy as jnp

from grpo_eqx.choices import Remat
from grpo_eqx.generation import Rollout
from grpo_eqx.loss_backends import LossBackend, TokenStats
from grpo_eqx.models.base import CausalLM
from grpo_eqx.models.causal_attention import CausalAttention
from grpo_eqx.training.packing import Packing


def token_stats(
    model: CausalLM,
    rollout: Rollout,
    packing: Packing | None,
    *,
    backend: LossBackend,
    mesh: jax.sharding.Mesh,
    dtype: jnp.dtype,
    remat: Remat,
    attention: CausalAttention,
    temperature: float,
) -> TokenStats:
    """Computes log-probs, entropies and logsumexps of the completions' tokens, `[P, G, Tc]`.

    **Arguments:** float32 parameters; the rows that completions share, if any; the dtype that the
    layers compute in; the temperature that divides the logits.
    """
    # The embedding table stays in float32: many tokens add to one row of its gradient.
    compute = eqx.tree_at(lambda m: m.embed_tokens, model.astype(dtype), model.embed_tokens)
    passes = remat, attention, mesh
    prompt = compute.prefill(rollout.prompts.ids, rollout.prompts.mask, *passes)
    ids, rows, width = rollout.completion_ids, None, rollout.completion_ids.shape[-1]
    if packing is not None:
        ids, rows = packing.pack(ids, fill=-1), packing.rows(width)  # -1: no token to score
        if len(ids) < len(rollout.completion_ids):
            prompt = prompt.picked(jnp.asarray(packing.prompt))
            ids, rows = jax.tree.map(lambda x: x.reshape(-1, 1, x.shape[-1]), (ids, rows))
    hidden = compute.completion_hidden(prompt, ids, *passes, rows)
    # The head stays in float32: its gradient is summed over all tokens before it is rounded.
    stats = backend(hidden, model.head, ids, temperature, mesh)
    if packing is None:
        return stats
    shape = packing.source.shape
    return jax.tree.map(lambda x: packing.unpack(x.reshape(shape), width), stats)
