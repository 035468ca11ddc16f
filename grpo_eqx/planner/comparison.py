"""Plans of a run for several topologies, or with several values of a setting, side by side."""

import math
from collections.abc import Mapping
from typing import Any, get_args

from rich.table import Table

from grpo_eqx.choices import RolloutShardingName
from grpo_eqx.planner.plan import Plan
from grpo_eqx.planner.search import MICRO_BATCH
from grpo_eqx.planner.tables import columns
from grpo_eqx.planner.time_report import STEPS, shown_cost, shown_duration, shown_seconds
from grpo_eqx.sharding.layout_report import readable_bytes


def variant(name: str, topology: str) -> tuple[str, dict[str, Any]]:
    """Returns what a name of `--compare` stands for: a topology, and settings.

    **Arguments:** a topology, a rollout sharding, or a size of micro-batches; the topology to plan
    for where it is not the first.
    """
    if name in get_args(RolloutShardingName) or name.startswith("tensor"):
        return topology, {"rollout_sharding": name}
    if name.isdecimal():
        return topology, {MICRO_BATCH: int(name)}
    return name, {}


def in_order(plans: Mapping[str, Plan]) -> list[tuple[str, Plan]]:
    """Returns plans with those that fit first, then the cheapest, or without a price the fastest.

    Those of unknown time come last. Ranges are compared by their lower ends.
    """

    def key(named: tuple[str, Plan]) -> tuple[bool, float]:
        plan, time = named[1], named[1].step_time
        if time is None:
            return not plan.fits, math.inf
        cost = time.cost(STEPS)
        return not plan.fits, time.total.least if cost is None else cost.least

    return sorted(plans.items(), key=key)


def comparison(plans: Mapping[str, Plan]) -> Table:
    """Returns a table with a row for each plan, the best first."""
    model = next(iter(plans.values())).model
    table = Table(title=f"{model}, plans side by side")
    names = ("", "devices", "memory", "fits", "rollout", "a step", f"{STEPS:,} steps", "cost")
    columns(table, *names, right={1, 2, 5, 6, 7})
    for name, plan in in_order(plans):
        table.add_row(
            name,
            f"{plan.num_devices}",
            f"{readable_bytes(plan.peak_bytes)} of {readable_bytes(plan.hbm_bytes)}",
            "yes" if plan.fits else "no",
            plan.rollout_sharding.partition(": ")[0],
            *_time(plan),
            style=None if plan.fits else "red",
        )
    return table


def auto_sizes(plans: Mapping[str, Plan]) -> str:
    """Returns the line on what `auto` micro-batches are in plans that fit; empty without any."""
    sizes = [
        f"{plan.micro_batch_size} ({name})"
        for name, plan in in_order(plans)
        if plan.fits and not name.isdecimal()  # a name that is a size
    ]
    return f"{MICRO_BATCH} auto: {', '.join(sizes)}" if sizes else ""


def _time(plan: Plan) -> tuple[str, str, str]:
    time = plan.step_time
    if time is None:
        return "-", "-", "-"
    cost = time.cost(STEPS)
    return (
        shown_seconds(time.total),
        shown_duration(time.total.times(float(STEPS))),
        "-" if cost is None else shown_cost(cost),
    )
