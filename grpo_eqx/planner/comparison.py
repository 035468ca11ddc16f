"""Plans of a run for several topologies, or with several values of a setting, side by side."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, get_args

from rich.table import Table

from grpo_eqx.common.choices import LOCAL, RolloutShardingName
from grpo_eqx.common.errors import UserError
from grpo_eqx.planner.devices import described_slice
from grpo_eqx.planner.plan import Plan
from grpo_eqx.planner.report import STEPS, columns, shown_cost, shown_duration, shown_seconds
from grpo_eqx.planner.search import MICRO_BATCH
from grpo_eqx.settings.types import closest
from grpo_eqx.sharding.layout_report import readable_bytes

_KINDS = (
    "topologies, rollout shardings (replicated, tensor:2, ...), sizes of micro-batches, or devices "
    "that train and sample (8+8)"
)
_SPLIT = re.compile(r"([1-9]\d*)\+([1-9]\d*)")


class Variant(NamedTuple):
    """One of the plans to compare."""

    topology: str
    changes: Mapping[str, Any]
    """Settings that are not the run's."""
    num_devices: int | None = None
    """Devices that the topology must have; `None` for any number."""

    def check(self, name: str, plan: Plan) -> None:
        """Raises `UserError` for the plan of a topology with another number of devices."""
        _check_devices(name, self, plan.num_devices)


def variants(names: Sequence[str], topology: str) -> dict[str, Variant]:
    """Returns the plans that names of `--compare` stand for.

    **Arguments:**

    - `names`: topologies, rollout shardings, sizes of micro-batches, or devices that train and
      sample.
    - `topology`: the topology to plan for, where a name is not one itself.

    Raises `UserError` for any other name, and for names of which some would be planned for this
    machine and some for a described topology.
    """
    if not names:
        raise UserError(f"compare has no names: give {_KINDS}.")
    found = {name: _variant(name, topology) for name in names}
    beside = [name for name, each in found.items() if not each.changes and name != LOCAL]
    others = [name for name, each in found.items() if each.changes]
    if "auto" in found and any(name.isdecimal() for name in found):
        raise UserError(
            "compare has auto, a rollout sharding there, beside sizes of micro-batches: leave it "
            "out, and find the largest that fits with --search micro_batch_size_per_device."
        )
    if topology == LOCAL and beside and others:
        raise UserError(
            f"compare has {others[0]}, which is planned for the devices of this machine, beside "
            f"{beside[0]}: name the devices for it with --topology, or compare it alone."
        )
    return found


def _variant(name: str, topology: str) -> Variant:
    shardings = get_args(RolloutShardingName)
    if name in shardings or name.startswith("tensor"):
        return Variant(topology, {"rollout_sharding": name})
    if split := _SPLIT.fullmatch(name):
        total = sum(map(int, split.groups()))
        variant = Variant(topology, {"rollout_devices": int(split[2])}, total)
        if topology != LOCAL:
            _check_devices(name, variant, described_slice(topology).chips)
        return variant
    if name.isdecimal():
        return Variant(topology, {MICRO_BATCH: int(name)})
    if name != LOCAL:
        if near := closest(name, shardings):
            raise UserError(f"compare has {name!r}: did you mean {near}?")
        try:
            described_slice(name)
        except UserError as error:
            raise UserError(f"{error} compare takes {_KINDS}.") from error
    return Variant(name, {})


def _check_devices(name: str, variant: Variant, number: int) -> None:
    if variant.num_devices not in (None, number):
        raise UserError(
            f"compare has {name}, of {variant.num_devices} devices, and {variant.topology} has "
            f"{number}: those that train and those that sample must add up to {number}."
        )


def in_order(plans: Mapping[str, Plan]) -> list[tuple[str, Plan]]:
    """Returns plans with those that fit first, then the cheapest, or without a price the fastest.

    Plans of unknown time come last. Ranges are compared by their lower ends.
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
    priced = any(plan.asked.price_per_device_hour is not None for plan in plans.values())
    table = Table(
        title=f"{model}, plans side by side",
        caption=f"Plans that fit come first, by their least {'cost' if priced else 'time'}.",
    )
    names = ("", "devices", "memory", "fits", "rollout", "a step", f"{STEPS:,} steps", "cost")
    columns(table, *names, right={1, 2, 5, 6, 7})
    for name, plan in in_order(plans):
        table.add_row(
            name,
            shown_devices(plan),
            f"{readable_bytes(plan.peak_bytes)} of {readable_bytes(plan.hbm_bytes)}",
            "yes" if plan.fits else "no",
            plan.rollout_sharding.partition(": ")[0],
            *_time(plan),
            style=None if plan.fits else "red",
        )
    return table


def shown_devices(plan: Plan) -> str:
    """Returns the number of devices, as `8+8` where some train and the others sample."""
    if not plan.rollout_devices:
        return f"{plan.num_devices}"
    return f"{plan.num_devices - plan.rollout_devices}+{plan.rollout_devices}"


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
