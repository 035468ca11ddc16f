"""Prints a plan: tables, then the verdict."""

import os
import sys
from collections.abc import Iterator, Mapping

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from grpo_eqx.planner.plan import Plan, PlannedProgram
from grpo_eqx.planner.tables import columns
from grpo_eqx.planner.time_report import time_parts
from grpo_eqx.sharding.layout_report import readable_bytes
from grpo_eqx.tracking.safe_console import safe_console

GiB, MiB = 2**30, 2**20
_PIPED_WIDTH = 120

_SHOWN_SETTINGS = (
    "prompts_per_step", "num_generations", "max_completion_length", "loss_backend", "optimizer",
    "lora_rank",
)  # fmt: skip


def wide_console() -> Console:
    """Returns a console of standard output, wide enough for tables where no terminal limits it."""
    limited = sys.stdout.isatty() or "COLUMNS" in os.environ
    return safe_console(width=None if limited else _PIPED_WIDTH)


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
    resident = (
        f"{readable_bytes(size)} of {name.replace('_', ' ')}"
        for name, size in plan.resident.items()
        if size
    )
    yield Text(f"Resident on each device throughout: {', '.join(resident)}.\n", style="dim")
    yield _buffers(plan.programs)
    if any(program.compiled.exchanges for program in plan.programs.values()):
        yield _exchanges(plan.programs)
    yield from time_parts(plan)


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
