"""Names of the metrics that a run logs, known before its first step."""

from collections.abc import Collection, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from grpo_eqx.loop.unknown_metric import unknown_metric
from grpo_eqx.models.config import ModelConfig
from grpo_eqx.objective import TokenBatch, Totals
from grpo_eqx.objective.objective import Objective
from grpo_eqx.rewards import RewardRunner
from grpo_eqx.run.passes import Passes
from grpo_eqx.settings.config import GRPOConfig
from grpo_eqx.tracking.metrics import (
    OF_THE_MACHINE,
    completion_metrics,
    failure_metrics,
    id_metrics,
    reward_metrics,
)
from grpo_eqx.training.expert_use import expert_metric_names
from grpo_eqx.training.updater import SKIPPED

_OF_STEPS = "grad_norm", "update_norm", SKIPPED, "learning_rate", "num_tokens"
_OF_DYNAMIC_SAMPLING = (
    "dynamic_sampling/num_generation_batches", "dynamic_sampling/frac_groups_dropped",
)  # fmt: skip
_OF_STALENESS = (
    "staleness/mean", "staleness/max", "staleness/frac_stale_tokens",
    "staleness/num_groups_waiting", "staleness/frac_idle_slots",
)  # fmt: skip


def check_best_metric(
    cfg: GRPOConfig,
    rewards: RewardRunner,
    objective: Objective,
    passes: Passes,
    model: ModelConfig,
    of_evaluations: Sequence[str],
    without_token: Collection[int],
) -> None:
    """Raises `UserError` if a run does not log `metric_for_best_model`.

    **Arguments:**

    - `cfg`, `rewards`, `objective`, `passes`, `model`: what decides the metrics of steps.
    - `of_evaluations`: names of the metrics of evaluations.
    - `without_token`: ids of the model for which its tokenizer has no token.
    """
    name = cfg.metric_for_best_model
    if name is None or name.startswith(OF_THE_MACHINE):
        return
    of_steps = metric_names(cfg, rewards, objective, passes, model, without_token)
    if name in of_steps or name in of_evaluations:
        return
    where = "no evaluation logs" if name.startswith("eval") else "training steps do not log"
    why = f"which {where}"
    if not of_evaluations:
        why += ", and evaluations are not made without eval_steps"
    raise unknown_metric("metric_for_best_model", name, why, [*of_steps, *of_evaluations])


def metric_names(
    cfg: GRPOConfig,
    rewards: RewardRunner,
    objective: Objective,
    passes: Passes,
    model: ModelConfig,
    without_token: Collection[int] = (),
) -> list[str]:
    """Returns the names of a step's metrics, but for those of the machine, in order.

    With an optimizer that was passed, the learning rate is not known, and not logged.
    """
    one = np.zeros((len(rewards.funcs), 1, 2))
    of_rewards = rewards.combined(one, one.astype(bool))
    lengths = np.ones((1, 2), int)
    names = {
        **reward_metrics(of_rewards),
        **failure_metrics(of_rewards),
        **completion_metrics(lengths, lengths.astype(bool)),
        **id_metrics((), without_token),
    }
    of_sampling = _OF_DYNAMIC_SAMPLING if cfg.dynamic_sampling else ()
    of_staleness = _OF_STALENESS if cfg.max_staleness else ()
    of_experts = expert_metric_names(model, cfg.router_replay)
    of_updates = _objective_names(objective, passes)
    return sorted({*names, *of_updates, *of_experts, *_OF_STEPS, *of_sampling, *of_staleness})


def _objective_names(objective: Objective, passes: Passes) -> list[str]:
    def metrics() -> dict[str, jax.Array]:
        floats = jnp.zeros((1, 2, 1), jnp.float32)
        mask = jnp.ones(floats.shape, bool)
        batch = TokenBatch(
            logps=floats,
            entropies=floats,
            sampler_logps=floats,
            advantages=floats[..., 0],
            mask=mask,
            policy_mask=mask,
            old_logps=floats if passes.old_policy else None,
            ref_logps=floats if passes.reference else None,
        )
        recorded = objective(batch, Totals.of(mask, mask))[1]
        return {name: x for part in recorded for name, x in part.items()}

    return list(jax.eval_shape(metrics))
