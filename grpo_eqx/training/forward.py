"""Forward pass over the rows of a micro-batch."""

import dataclasses
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Integer

from grpo_eqx.common.choices import Remat
from grpo_eqx.common.shapes import Number
from grpo_eqx.generation.routes import Routes
from grpo_eqx.loss_backends import LossBackend, TokenStats
from grpo_eqx.models.causal_attention import CausalAttention
from grpo_eqx.models.interface import CausalLM
from grpo_eqx.sharding.rules import BATCH_AXES, last_dim_sharding, replicated
from grpo_eqx.training.expert_use import ExpertUse
from grpo_eqx.training.rows import Rows


class ForwardPass(NamedTuple):
    """Results of a forward pass over rows."""

    stats: TokenStats
    """Log-probs, entropies and logsumexps of the scored tokens, `[R, S]`."""
    expert_use: ExpertUse | None
    """Use of the experts, of models that have some."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forward:
    """Strategies of a forward pass."""

    backend: LossBackend
    mesh: jax.sharding.Mesh
    dtype: jnp.dtype
    """Dtype that the layers compute in."""
    remat: Remat
    attention: CausalAttention

    def __call__(
        self, model: CausalLM, rows: Rows, routes: Routes | None, temperature: Number
    ) -> ForwardPass:
        """Computes the log-probs of the completions in rows.

        **Arguments:**

        - `model`: parameters, float32 where they are trained.
        - `rows`: a micro-batch.
        - `routes`: the rollout's experts, which are used where the rows replay them.
        - `temperature`: divisor of the logits.
        """
        # A trained embedding table stays in float32: many tokens add to one row of its gradient.
        compute = eqx.tree_at(
            lambda m: m.embed_tokens, model.astype(self.dtype), model.embed_tokens
        )
        replayed = _routes(routes, rows, self.mesh)
        hidden, chosen = compute.hidden(
            rows.ids, rows.positions, rows.visible, self.remat, self.attention, self.mesh, replayed
        )
        hidden = jnp.take_along_axis(hidden, rows.scored[..., None], axis=1)
        # A trained head stays in float32: its gradient is summed over all tokens before it is
        # rounded.
        stats = self.backend(
            hidden[:, None],
            model.head,
            rows.targets[:, None],
            temperature,
            self.mesh,
            model.config.logit_softcap,
        )
        stats = jax.tree.map(lambda x: x[:, 0], stats)
        shape = model.config.experts
        if shape is None or chosen is None:
            return ForwardPass(stats, None)
        return ForwardPass(stats, ExpertUse.of(chosen, replayed, rows.is_completion, shape))


def _routes(
    routes: Routes | None, rows: Rows, mesh: jax.sharding.Mesh
) -> Integer[Array, "R W Lk"] | None:
    """Gathers the experts to replay: each device takes its part of all rows', then all of its rows.

    Without constraints, the compiler would gather the experts of the whole batch.
    """
    source = rows.route_source
    if source is None:
        return None
    assert routes is not None
    constrain = jax.lax.with_sharding_constraint
    everywhere = constrain(source, replicated(mesh))
    of_completions = routes.completions.reshape(-1, *routes.completions.shape[2:])
    own = of_completions[jnp.maximum(everywhere.completions, 0), everywhere.offsets]
    of_prompt = routes.prompts[everywhere.prompts, everywhere.prompt_offsets]
    chosen = jnp.where((everywhere.completions < 0)[..., None], of_prompt, own)
    chosen = constrain(chosen, last_dim_sharding(mesh, chosen.shape))
    return constrain(chosen, NamedSharding(mesh, PartitionSpec(BATCH_AXES)))
