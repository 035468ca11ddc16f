"""Optimizer of a config."""

import jax
import numpy as np
import optax
from jaxtyping import Float

from grpo_eqx.config import GRPOConfig
from grpo_eqx.models.base import CausalLM, parameter_name


def learning_rate_schedule(cfg: GRPOConfig) -> optax.Schedule:
    """Returns the learning rate by update: linear warm-up, then constant or decaying to 0.

    Decay reaches 0 after the last update.
    """
    assert cfg.learning_rate is not None  # resolved
    warmup_updates = cfg.num_warmup_updates
    updates = cfg.steps * cfg.updates_per_step - warmup_updates
    after = {
        "constant": optax.constant_schedule(cfg.learning_rate),
        "linear": optax.linear_schedule(cfg.learning_rate, 0.0, max(updates, 1)),
        "cosine": optax.cosine_decay_schedule(cfg.learning_rate, max(updates, 1)),
    }[cfg.lr_scheduler_type]
    if warmup_updates == 0:
        return after
    warmup = optax.linear_schedule(0.0, cfg.learning_rate, warmup_updates)
    return optax.join_schedules([warmup, after], [warmup_updates])


def learning_rates(cfg: GRPOConfig) -> Float[np.ndarray, " updates"]:
    """Returns each update's learning rate on the host: asking a device would wait for its work."""
    updates = np.arange(cfg.steps * cfg.updates_per_step)
    return np.broadcast_to(np.asarray(learning_rate_schedule(cfg)(updates)), updates.shape)


def make_optimizer(cfg: GRPOConfig) -> optax.GradientTransformation:
    """Builds AdamW or Lion with the config's schedule, after clipping to `max_grad_norm`."""
    build = optax.adamw if cfg.optimizer == "adamw" else optax.lion
    return optax.chain(
        optax.clip_by_global_norm(cfg.max_grad_norm),
        build(
            learning_rate_schedule(cfg),
            b1=cfg.adam_beta1,
            b2=cfg.adam_beta2,
            weight_decay=cfg.weight_decay,
            mask=_is_matrix,
        ),
    )


def _is_matrix(params: CausalLM) -> CausalLM:
    """Masks weight decay: True for matrices, False for norms and biases."""
    return jax.tree.map_with_path(
        lambda path, _: not parameter_name(path).endswith(("norm", "bias")), params
    )
