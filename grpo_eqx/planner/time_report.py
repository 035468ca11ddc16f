"""Prints the times of a plan: a table, what binds each program, and the cost."""

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from grpo_eqx.planner.advice import advice
from grpo_eqx.planner.plan import Plan
from grpo_eqx.planner.step_time import Part, ProgramTime, StepTime
from grpo_eqx.planner.tables import columns
from grpo_eqx.planner.trips import Range

STEPS = 1000
_MOST = 0.5
"""Share of what a program receives, from which the loop that receives it is named."""
_UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_DURATIONS = ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"))


def time_parts(plan: Plan) -> Iterator[RenderableType]:
    """Yields what a report says of time; where a rate is unknown, that it is."""
    if plan.step_time is None:
        if plan.fits:
            yield Text(
                f"The rates of {plan.device_kind} are unknown, and so is the time of a step.\n",
                style="dim",
            )
        return
    yield _table(plan, plan.step_time)
    yield Text(
        "Seconds at peak rates, from all work overlapping to none; real steps take longer, and "
        "rewards come on top.",
        style="dim",
    )
    for name, program in plan.step_time.programs.items():
        hint = advice(name, program.bound_by, plan)
        then = f": {hint}" if hint else ""
        bound = f"{_BOUNDS[program.bound_by]}{_loop_that_receives(program)}"
        yield Text(f"{name} is bound by {bound}{then}.", style="dim")
    yield Text(f"{summary(plan, plan.step_time)}\n")


_BOUNDS = {"arithmetic": "arithmetic", "memory": "memory bandwidth", "links": "the links"}


def _loop_that_receives(program: ProgramTime) -> str:
    """Names the loop in which most is received, where links bind a program."""
    most = program.received_most
    if program.bound_by != "links" or most is None or most[1] < _MOST:
        return ""
    return f" ({most[1]:.0%} of what it receives in the loop of {most[0]})"


def summary(plan: Plan, time: StepTime) -> str:
    """Returns the time of a step and of 1,000, and their cost, in a sentence."""
    length = f"completions of {plan.completion_length} tokens"
    said = (
        f"With {length}, a step takes {shown_seconds(time.total)} at the devices' peaks, and "
        f"{STEPS:,} steps {shown_duration(time.total.times(STEPS))}"
    )
    cost = time.cost(STEPS)
    if cost is None:
        return f"{said}."
    price = f"{plan.price_per_device_hour:g} per device and hour"
    return f"{said}, at a cost of {shown_cost(cost)} ({price})."


def shown(numbers: Range, form: str) -> str:
    """Formats a range; both ends as one where they look the same."""
    least, most = (format(x, form) for x in numbers)
    return least if least == most else f"{least}–{most}"


def shown_cost(cost: Range) -> str:
    """Formats a range of costs, in the unit of the price."""
    return shown(cost, ",.2f" if cost.most < 10 else ",.0f")


def shown_seconds(seconds: Range) -> str:
    """Formats a range of seconds."""
    return f"{shown(seconds, '.2f' if seconds.most < 100 else ',.0f')} s"


def shown_duration(seconds: Range) -> str:
    """Formats a range of seconds in a unit that suits its end."""
    for size, unit in _DURATIONS:
        if seconds.most >= size:
            return f"{shown(seconds.times(1 / size), ',.1f')} {unit}"
    return shown_seconds(seconds)


def _table(plan: Plan, time: StepTime) -> Table:
    table = Table(title="Time of a step on each device, by its work each time")
    columns(
        table, "program", "where", "times", "FLOP", "memory", "links", "seconds",
        right={2, 3, 4, 5, 6},
    )  # fmt: skip
    for name, program in time.programs.items():
        for i, part in enumerate(program.parts):
            table.add_row("" if i else name, *_row(part))
        if len(program.parts) > 1:
            table.add_row("", "all", "", "", "", "", _seconds(program.total))
        table.add_section()
    table.add_row("step", "", "", "", "", "", _seconds(time.total), style="bold")
    return table


def _row(part: Part) -> tuple[str, ...]:
    received = sum(part.work.received.values(), 0.0)
    return (
        part.where,
        shown(part.repeats, ",.0f" if part.repeats.most >= 10 else ",.3g"),
        _amount(part.work.flops),
        _amount(part.work.num_bytes, "B"),
        _amount(received, "B"),
        _seconds(part.total),
    )


def _seconds(seconds: Range) -> str:
    return shown(seconds, ".3f" if seconds.most < 10 else ",.1f")


def _amount(number: float, unit: str = "") -> str:
    if number == 0:
        return "-"
    for size, prefix in _UNITS:
        if number >= size:
            return f"{number / size:.3g} {prefix}{unit}"
    return f"{number:.0f} {unit}".rstrip()
