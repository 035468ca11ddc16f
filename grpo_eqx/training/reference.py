"""The reference model of the KL term: copied from the policy, and moved after it."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from grpo_eqx.models.interface import CausalLM
from grpo_eqx.settings.config import GRPOConfig


@partial(jax.jit, static_argnames=("dtype", "mesh"))
def copied(model: CausalLM, dtype: jnp.dtype | None, mesh: jax.sharding.Mesh) -> CausalLM:
    """Copies a model for `score`: its layers in `dtype`, or in float32 to be mixed (`None`)."""
    copy = model
    if dtype is not None:
        # This loses nothing: the forward pass casts the layers to the compute dtype anyway.
        # Mixtures must not be rounded to it, or small changes would never add up.
        copy = eqx.tree_at(lambda m: m.layers, model, model.astype(dtype).layers)
    copy = jax.tree.map(jnp.copy, copy)  # own buffers: the model's will be donated
    return jax.lax.with_sharding_constraint(copy, model.shardings(mesh))


@partial(jax.jit, donate_argnames="reference", static_argnames="mesh")
def mixed(
    reference: CausalLM, model: CausalLM, alpha: Float[Array, ""], mesh: jax.sharding.Mesh
) -> CausalLM:
    """Returns alpha * model + (1 - alpha) * reference, whose arrays are donated.

    This is the soft update of TR-DPO (arXiv 2404.09656, eq. 2).
    """

    def mix(old: Array, new: Array) -> Array:
        return alpha * new + (1 - alpha) * old

    mixture = jax.tree.map(mix, reference, model)
    return jax.lax.with_sharding_constraint(mixture, model.shardings(mesh))


def sync_is_due(cfg: GRPOConfig, step: int) -> bool:
    """Returns whether the reference moves after a step, counted from 1."""
    every = cfg.ref_model_sync_steps
    return cfg.sync_ref_model and every is not None and step % every == 0
