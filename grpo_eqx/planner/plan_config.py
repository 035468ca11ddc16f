"""Plans the run of a config, without a trainer."""

import sys

import optax

from grpo_eqx.common.choices import LOCAL, Searchable
from grpo_eqx.common.clean_text import print_clean
from grpo_eqx.loss_backends import LossBackend
from grpo_eqx.planner.devices import find_target
from grpo_eqx.planner.plan import Plan
from grpo_eqx.planner.search import plan_run
from grpo_eqx.run.passed import Passed
from grpo_eqx.run.spec import RunSpec
from grpo_eqx.settings.config import GRPOConfig
from grpo_eqx.sharding import Mesh, RolloutSharding


def plan_config(
    cfg: GRPOConfig,
    topology: str = LOCAL,
    search: Searchable | None = None,
    *,
    optimizer: optax.GradientTransformation | None = None,
    mesh: Mesh | None = None,
    rollout_sharding: RolloutSharding | None = None,
    loss_backend: LossBackend | None = None,
) -> Plan:
    """Plans the run of a config and objects, as `GRPOTrainer.plan` does, without loading weights.

    **Arguments:** the settings; a TPU type or grid, or `local`; a setting, to look for the largest
    value with which the run fits; what a `GRPOTrainer` would be passed in place of settings.

    Of the model only `config.json` is read. Raises `UserError` where the mesh, the batches or the
    model do not fit the devices, and for objects that no run could use.
    """
    passed = Passed(
        optimizer=optimizer,
        mesh=mesh,
        rollout_sharding=rollout_sharding,
        loss_backend=loss_backend,
    )
    run = RunSpec.describe(cfg, passed)
    return plan_run(run, find_target(topology), _say, search)


def _say(text: str) -> None:
    print_clean(text, file=sys.stderr)
