"""Prints plans of a run for several topologies side by side."""

import math
from collections.abc import Mapping

from rich.table import Table

from grpo_eqx.planner.plan import Plan
from grpo_eqx.planner.tables import columns
from grpo_eqx.planner.time_report import STEPS, shown, shown_duration, shown_seconds
from grpo_eqx.sharding.layout_report import readable_bytes


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
    table = Table(title=f"{model}, by topology")
    names = ("topology", "devices", "memory", "fits", "a step", f"{STEPS:,} steps", "cost")
    columns(table, *names, right={1, 2, 4, 5, 6})
    for name, plan in in_order(plans):
        table.add_row(
            name,
            f"{plan.num_devices}",
            f"{readable_bytes(plan.peak_bytes)} of {readable_bytes(plan.hbm_bytes)}",
            "yes" if plan.fits else "no",
            *_time(plan),
            style=None if plan.fits else "red",
        )
    return table


def _time(plan: Plan) -> tuple[str, str, str]:
    time = plan.step_time
    if time is None:
        return "-", "-", "-"
    cost = time.cost(STEPS)
    return (
        shown_seconds(time.total),
        shown_duration(time.total.times(float(STEPS))),
        "-" if cost is None else shown(cost, ",.0f"),
    )
