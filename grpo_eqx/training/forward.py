"""Forward pass over the rows of completed rollouts."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Integer

from grpo_eqx.common.choices import Remat
from grpo_eqx.common.shapes import Number
from grpo_eqx.generation import Rollout
from grpo_eqx.loss_backends import LossBackend, TokenStats
from grpo_eqx.models.causal_attention import CausalAttention
from grpo_eqx.models.interface import CausalLM
from grpo_eqx.sharding.rules import BATCH_AXES, last_dim_sharding, replicated
from grpo_eqx.training.expert_use import ExpertUse
from grpo_eqx.training.rows import Rows


class ForwardPass(NamedTuple):
    """Results of a forward pass over rows."""

    stats: TokenStats
    """Log-probs, entropies and logsumexps of the completions, `[R, C, Tc]`."""
    expert_use: ExpertUse | None
    """Use of the experts, of models that have some."""


def forward_pass(
    model: CausalLM,
    rollout: Rollout,
    rows: Rows,
    *,
    backend: LossBackend,
    mesh: jax.sharding.Mesh,
    dtype: jnp.dtype,
    remat: Remat,
    attention: CausalAttention,
    temperature: Number,
) -> ForwardPass:
    """Computes the log-probs of the completions in rows, by the rollout's routes if it has some.

    **Arguments:** parameters, float32 where they are trained; the batch, and a micro-batch of its
    rows; the dtype that the layers compute in; the temperature that divides the logits.
    """
    # A trained embedding table stays in float32: many tokens add to one row of its gradient.
    compute = eqx.tree_at(lambda m: m.embed_tokens, model.astype(dtype), model.embed_tokens)
    replayed = _routes(rollout, rows, mesh)
    hidden, chosen = compute.hidden(
        rows.inputs(rollout), rows.positions, rows.visible, remat, attention, mesh, replayed
    )
    hidden = jnp.take_along_axis(hidden, rows.scored[..., None], axis=1)
    # A trained head stays in float32: its gradient is summed over all tokens before it is rounded.
    stats = backend(
        hidden[:, None],
        model.head,
        rows.targets(rollout)[:, None],
        temperature,
        mesh,
        model.config.logit_softcap,
    )
    length = rollout.completion_ids.shape[-1]
    stats = jax.tree.map(lambda x: rows.by_completion(x[:, 0], length), stats)
    shape, is_input = model.config.experts, rows.of_completion >= 0
    if shape is None or chosen is None:
        return ForwardPass(stats, None)
    return ForwardPass(stats, ExpertUse.of(chosen, replayed, is_input, shape))


def _routes(
    rollout: Rollout, rows: Rows, mesh: jax.sharding.Mesh
) -> Integer[Array, "R W Lk"] | None:
    """Gathers the experts to replay: each device takes its part of all rows', then all of its rows.

    Without constraints, the compiler would gather those of the whole batch.
    """
    if rollout.routes is None:
        return None
    constrain = jax.lax.with_sharding_constraint
    routes = constrain(rows, replicated(mesh)).routes(rollout)
    routes = constrain(routes, last_dim_sharding(mesh, routes.shape))
    return constrain(routes, NamedSharding(mesh, PartitionSpec(BATCH_AXES)))
