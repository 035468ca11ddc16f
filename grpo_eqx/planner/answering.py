"""From a run and devices to the whole plan: with a search's result, or with what would help."""

import dataclasses

from grpo_eqx.planner.changes import find_change
from grpo_eqx.planner.plan import Plan
from grpo_eqx.planner.planning import Say, make_plan
from grpo_eqx.planner.run import PlannedRun
from grpo_eqx.planner.search import Searchable, search, settled
from grpo_eqx.planner.target import Target


def plan_run(
    run: PlannedRun,
    target: Target,
    say: Say,
    setting: Searchable | None = None,
    *,
    help_if_not: bool = True,
) -> Plan:
    """Plans a run; or looks for the largest value of a setting, and plans the run with that.

    Where the run does not fit, the plan says what helps, unless it is told not to. Raises
    `UserError` where the mesh, the batches or the model do not fit the devices.
    """
    found, change = None, None
    if setting is not None:
        found, run = search(run, target, setting, say)
    run = settled(run, target, say)
    plan = make_plan(run, target, say)
    if help_if_not and not plan.fits and (found is None or found.largest is not None):
        change = find_change(run, target, plan, say)
    return dataclasses.replace(plan, found=found, change=change)
