"""The report of a plan: tables of memory and times, what binds each program, and the verdict."""

import os
import sys
from collections.abc import Iterator, Mapping
from typing import Literal

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from grpo_eqx.generation.turn_programs import EXTEND
from grpo_eqx.planner.advice import advice
from grpo_eqx.planner.plan import Plan, PlannedProgram
from grpo_eqx.planner.step_time import Part, ProgramTime, StepTime
from grpo_eqx.planner.trips import Range
from grpo_eqx.run.to_compile import SENT_WEIGHTS
from grpo_eqx.sharding.layout_report import readable_bytes
from grpo_eqx.tracking.safe_console import safe_console

GiB, MiB = 2**30, 2**20
WIDTH = 120

_SHOWN_SETTINGS = (
    "prompts_per_step", "num_generations", "max_completion_length", "loss_backend", "optimizer",
    "lora_rank",
)  # fmt: skip
_BOUNDS = {"arithmetic": "arithmetic", "memory": "memory bandwidth", "links": "the links"}
STEPS = 1000
_MOST = 0.5
"""Share of what a program receives, from which the loop that receives it is named."""
_UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_DURATIONS = ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"))


def wide_console() -> Console:
    """Returns a console of standard output, wide enough for tables where no terminal limits it."""
    limited = sys.stdout.isatty() or "COLUMNS" in os.environ
    return safe_console(width=None if limited else WIDTH)


def print_plan(plan: Plan, console: Console | None = None) -> None:
    """Prints the whole plan as `grpo-eqx plan` does, by default to standard output."""
    console = wide_console() if console is None else console
    console.print(Group(*_parts(plan)))
    if plan.found is not None:
        console.print(_tried(plan.found.setting, plan.found.tried))
    if plan.change is not None:
        console.print(f"With {plan.change.flags}:", highlight=False)
        console.print(_memory(plan.change.plan))
    console.print(Text(plan.verdict, style="bold green" if plan.fits else "bold red"))


def _parts(plan: Plan) -> Iterator[RenderableType]:
    axes = ", ".join(f"{name}={size}" for name, size in plan.mesh.items())
    hosts = "1 host" if plan.num_hosts == 1 else f"{plan.num_hosts} hosts"
    yield Text.assemble(
        (plan.model, "bold"),
        f" on {plan.topology}: {plan.num_devices} x {plan.device_kind} on {hosts}, mesh {axes}",
    )
    if plan.rollout_devices:
        yield Text(f"{plan.rollout_devices} of them sample, the others train", style="dim")
    if plan.num_devices > 1:
        yield Text(f"rollout sharding {plan.rollout_sharding}", style="dim")
    settings = ", ".join(
        f"{name} {plan.settings[name]}"
        for name in _SHOWN_SETTINGS
        if plan.settings[name] is not None
    )
    yield Text(settings, style="dim")
    source = "from the data" if plan.prompt_length_known else "max_prompt_length"
    yield Text(f"prompts of up to {plan.prompt_length} tokens ({source})", style="dim")
    yield Text(_micro_batches(plan), style="dim")
    yield _memory(plan)
    resident = ", ".join(
        f"{readable_bytes(size)} of {name.replace('_', ' ')}"
        for name, size in plan.resident.items()
        if size and name != SENT_WEIGHTS
    )
    if plan.rollout_devices:
        sent = readable_bytes(plan.resident[SENT_WEIGHTS])
        resident = f"{resident}; on those that sample, {sent} of the weights"
    yield Text(f"Resident on each device throughout: {resident}.\n", style="dim")
    yield _buffers(plan.programs)
    if any(program.compiled.exchanges for program in plan.programs.values()):
        yield _exchanges(plan.programs)
    yield from _time_parts(plan)


def _micro_batches(plan: Plan) -> str:
    rows, most = plan.rows, plan.rows.most_micro_batches
    count = "1 micro-batch" if most == 1 else f"{most} micro-batches or fewer"
    name = "micro_batch_size_per_device"
    plural = "" if rows.num_rows == 1 else "s"
    reasons = {None: ", by default", "auto": ", auto: the largest that fits"}
    return (
        f"updates in {count} of {rows.num_rows} row{plural} of {rows.width} tokens "
        f"({name} {plan.micro_batch_size}{reasons.get(plan.settings[name], '')})"
    )


def _memory(plan: Plan) -> Table:
    unit, name = (GiB, "GiB") if plan.peak_bytes >= GiB else (MiB, "MiB")
    usable = f"{plan.hbm_bytes / unit:,.2f}"
    table = Table(title=f"Memory per device in {name} ({usable} usable)")
    columns(
        table, "program", "arguments", "results", "temporary", "code", "elsewhere", "peak", "used"
    )
    for name, program in plan.programs.items():
        each, peak = program.compiled, program.peak_bytes
        parts = (each.argument_bytes, each.output_bytes, each.temporary_bytes, each.code_bytes)
        sizes = (*parts, program.elsewhere_bytes, peak)
        table.add_row(
            name,
            *("-" if size is None else f"{size / unit:,.2f}" for size in sizes),
            f"{peak / plan.hbm_bytes:.0%}",
            style="red" if name in plan.too_large else None,
        )
    return table


def _buffers(programs: Mapping[str, PlannedProgram]) -> Table:
    table = Table(title="Largest arrays that programs allocate, per device")
    columns(table, "program", "MiB", "array", "operation", "source", right={1})
    for name, program in programs.items():
        for i, buffer in enumerate(program.compiled.buffers):
            table.add_row(
                "" if i else name,
                f"{buffer.num_bytes / MiB:,.1f}",
                Text(buffer.shape),
                Text(buffer.operation),
                buffer.source,
            )
    return table


def _exchanges(programs: Mapping[str, PlannedProgram]) -> Table:
    table = Table(title="Collectives (each instruction counts once, even inside a loop)")
    columns(table, "program", "kind", "instructions", "MiB per device", right={2, 3})
    for name, program in programs.items():
        for i, each in enumerate(program.compiled.exchanges):
            size = f"{each.num_bytes / MiB:,.1f}"
            table.add_row("" if i else name, each.kind, str(each.instructions), size)
    return table


def _tried(setting: str, tried: Mapping[int, bool]) -> Table:
    table = Table(title="Values tried")
    columns(table, setting, "fits", right={0})
    for value, fits in tried.items():
        table.add_row(str(value), "yes" if fits else "no", style=None if fits else "red")
    return table


def _time_parts(plan: Plan) -> Iterator[RenderableType]:
    """Yields what a report says of time; where a rate is unknown, that it is."""
    if plan.step_time is None:
        if plan.fits:
            yield Text(
                f"The rates of {plan.device_kind} are unknown, and so is the time of a step.\n",
                style="dim",
            )
        return
    yield _times(plan, plan.step_time)
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
    said = [_summary(plan, plan.step_time)]
    if EXTEND in plan.step_time.programs:
        said.append(_turns(plan, plan.step_time))
    yield Text("\n".join([*said, ""]))


def _loop_that_receives(program: ProgramTime) -> str:
    """Names the loop in which most is received, where links bind a program."""
    most = program.received_most
    if program.bound_by != "links" or most is None or most[1] < _MOST:
        return ""
    return f" ({most[1]:.0%} of what it receives in the loop of {most[0]})"


def _summary(plan: Plan, time: StepTime) -> str:
    """Returns the time of a step and of 1,000, and their cost, in a sentence."""
    said = (
        f"With {_completions(plan)}, a step takes {shown_seconds(time.total)} at the devices' "
        f"peaks, and {STEPS:,} steps {shown_duration(time.total.times(STEPS))}"
    )
    cost = time.cost(STEPS)
    if cost is None:
        return f"{said}."
    price = f"{plan.asked.price_per_device_hour:g} per device and hour"
    return f"{said}, at a cost of {shown_cost(cost)} ({price})."


def _completions(plan: Plan) -> str:
    expected = plan.expected
    said = f"completions of {expected.length} tokens"
    if expected.turns == 1:
        return said
    return (
        f"{said} in {expected.turns} turns, between which the model reads "
        f"{expected.observation_length} tokens"
    )


def _turns(plan: Plan, time: StepTime) -> str:
    """Says what it costs that completions have several turns, in a sentence."""
    read = time.programs[EXTEND].total
    return (
        f"Reading between turns takes {shown_seconds(read)} of that, for {plan.expected.num_read} "
        f"tokens of each completion. Devices may idle besides, while tools run."
    )


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


def _times(plan: Plan, time: StepTime) -> Table:
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
    if time.ahead:
        table.add_row("sampling, ahead", "", "", "", "", "", _seconds(time.sampling))
        table.add_row("training, meanwhile", "", "", "", "", "", _seconds(time.training))
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


def columns(table: Table, *names: str, right: set[int] | None = None) -> None:
    """Adds columns; all but the first are of numbers, or those that `right` lists.

    What is too wide for its column goes on in the next line: a number that is cut off would read as
    another one.
    """
    numbers = set(range(1, len(names))) if right is None else right
    for i, name in enumerate(names):
        justify: Literal["left", "right"] = "right" if i in numbers else "left"
        table.add_column(name, justify=justify, overflow="fold")
