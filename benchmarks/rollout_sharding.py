r"""Rollout shardings side by side, on one mesh of training.

    python benchmarks/rollout_sharding.py --model 3B --prompts 64 --prompt-length 256 \
        --completion-length 512                              # on every host of a pod
    grpo-eqx launch local --processes 4 --devices-per-process 4 -- \
        python benchmarks/rollout_sharding.py                # a simulated pod
    JAX_PLATFORMS=cpu python benchmarks/rollout_sharding.py --topology v6e-16 --model 0.5B \
        --prompts 64 --prompt-length 256 --completion-length 512   # a described pod

Times the generation of a rollout by random weights, in turns. With `--topology` nothing runs: it
prints the memory of the compiled programs on each device, and what they send between devices. Whole
runs with either sharding: pod_scaling.py.
"""

import dataclasses
import json
import re
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import tyro
from device_facts import SHARED_CORES, device_facts, largest_memory_stat
from rich.console import Console
from rich.table import Table
from rollout_programs import (
    MODELS,
    Work,
    compile_generate,
    compile_update,
    make_sampler,
    make_updater,
    random_model,
    random_prompts,
)

from grpo_eqx import UserError
from grpo_eqx.distributed import initialize, is_main
from grpo_eqx.generation.engine import TOKENS
from grpo_eqx.generation.sampler import Sampled
from grpo_eqx.planner.devices import described_devices
from grpo_eqx.planner.hlo import Collective, collectives
from grpo_eqx.sharding import parse_mesh
from grpo_eqx.training.scorer import MICRO_BATCHES

MiB = 2**20
# Where a program's collectives stand, by how many of its loops are around them.
GENERATE_PROMPTS = ("once", "each layer, prompts")
GENERATE_TOKENS = ("once", "each token", "each token and layer")
# The loop over layers in a loop over tokens.
_DECODED_LAYERS = re.compile(rf' while\(.*op_name="[^"]*/{TOKENS}/while/body/while"')
Rows = list[dict[str, Any]]
_ONLY_ON_CPUS = "as_on_cpus is for CPUs that run: leave it out."


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutShardings:
    """What to generate, where."""

    styles: tuple[str, ...] = ("replicated", "legacy", "maxtext")
    """Rollout shardings, as in `--styles replicated tensor:4`. A device's peak memory is known of
    one alone, or of the first."""
    mesh: str = "host_local"
    """Layout of the devices, as for training."""
    model: Literal["tiny", "small", "0.5B", "3B"] = "tiny"
    """Sizes of the embedded model, of one of 6.3 million parameters, or of Qwen2.5."""
    prompts: int = 16
    """Prompts of a rollout."""
    group: int = 8
    """Completions of each."""
    prompt_length: int = 64
    """Tokens of a prompt."""
    completion_length: int = 64
    """Tokens of a completion."""
    repeats: int = 5
    """Timed rollouts of each."""
    as_on_cpus: bool = False
    """Decode as runs on CPUs do, with unrolled layers and transposed weights and keys: XLA then
    gathers weights once, before the loop over tokens, in any style. Otherwise CPUs loop over
    layers, as accelerators do."""
    topology: str | None = None
    """Compile for a described TPU type (v6e-16), and run nothing."""
    markdown: bool = False
    """Print tables as Markdown."""
    json: Path | None = None
    """File for the figures."""

    def __post_init__(self) -> None:
        for name in ("prompts", "group", "prompt_length", "completion_length", "repeats"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}: it must be at least 1.")
        if self.as_on_cpus and self.topology is not None:
            raise UserError(_ONLY_ON_CPUS)

    @property
    def work(self) -> Work:
        sizes = self.prompts, self.group, self.prompt_length, self.completion_length
        return Work(MODELS[self.model], *sizes)


def main(cfg: RolloutShardings) -> None:
    if cfg.topology is None:
        told = {name: str(value) for name, value in dataclasses.asdict(cfg).items()}
        initialize(told, timeout=60.0)
        mesh, make = parse_mesh(cfg.mesh).build(), measured
    else:
        mesh, make = parse_mesh(cfg.mesh).build(described_devices(cfg.topology)), compiled
    figures = {"mesh": {"name": cfg.mesh, **mesh.shape}, "model": cfg.model, **make(cfg, mesh)}
    if is_main():
        show(cfg, figures)
        if cfg.json is not None:
            cfg.json.write_text(json.dumps(figures, indent=2) + "\n")


def measured(cfg: RolloutShardings, mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """Seconds and memory of each style's rollouts, which take turns."""
    # Not before: devices are known only once the processes have met.
    if cfg.as_on_cpus and mesh.devices.flat[0].platform != "cpu":
        raise UserError(_ONLY_ON_CPUS)
    work = cfg.work
    model, prompts = random_model(work, mesh), random_prompts(work)
    samplers = {
        style: make_sampler(work, style, mesh, loops_over_layers=not cfg.as_on_cpus)
        for style in cfg.styles
    }
    seconds: dict[str, list[float]] = {style: [] for style in cfg.styles}
    sampled, rows = [], []

    def generate(style: str) -> Sampled:
        samplers[style].set_weights(model, 0)
        return samplers[style].submit(prompts).result()

    for style in cfg.styles:
        sampled.append(np.array([each.ids for each in generate(style).trajectories]))
        # A peak never falls again: after the first style it may be another's.
        peak = largest_memory_stat("peak_bytes_in_use", jax.local_devices())
        rows.append(
            {
                "style": style,
                "bytes_in_use": largest_memory_stat("bytes_in_use", jax.local_devices()),
                "peak_bytes_in_use": peak if style == cfg.styles[0] else None,
            }
        )
    for _ in range(cfg.repeats):
        for style in cfg.styles:
            start = time.perf_counter()
            generate(style)
            seconds[style].append(time.perf_counter() - start)
    for row in rows:
        row["seconds"] = statistics.median(seconds[row["style"]])
        row["tokens_per_s"] = work.tokens / row["seconds"]
    differing = [int((other != sampled[0]).any(-1).sum()) for other in sampled[1:]]
    return {
        **device_facts(),
        "rollouts": rows,
        "all_seconds": seconds,
        "completions": work.prompts * work.group,
        "differing_completions": sum(differing),
    }


def compiled(cfg: RolloutShardings, mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """Memory of each program on each device, and its collectives."""
    work = cfg.work
    made = {
        f"generate, {style}": compile_generate(make_sampler(work, style, mesh), work)
        for style in cfg.styles
    }
    made["update"] = compile_update(make_updater(mesh), work)  # the same for all styles
    return {
        "topology": cfg.topology,
        "memory": [memory_row(name, program) for name, program in made.items()],
        "collectives": [
            {"program": name, **row}
            for name, program in made.items()
            for row in summary(program.as_text())
        ],
    }


def memory_row(name: str, program: jax.stages.Compiled) -> dict[str, Any]:
    memory = program.memory_analysis()
    return {
        "program": name,
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
    }


def summary(text: str) -> Rows:
    """Number and bytes of the collectives of a kind at each place, and the largest of them.

    A large cache is decoded into by several loops over tokens, one after another: means of them.
    """
    token_loops = max(1, len(_DECODED_LAYERS.findall(text)))
    groups = defaultdict[tuple[str, str], list[Collective]](list)
    for each in collectives(text):
        groups[place(each)].append(each)
    rows = []
    for (where, kind), members in groups.items():
        largest = max(members, key=lambda each: each.num_bytes)
        num_bytes = sum(each.num_bytes for each in members)
        loops = token_loops if where in GENERATE_TOKENS[1:] else 1
        row = {"where": where, "kind": kind, "number": len(members) / loops}
        row["bytes"] = num_bytes / loops
        rows.append({**row, "largest": largest.shapes})
    return sorted(rows, key=lambda row: (row["where"] != "once", row["where"], -row["bytes"]))


def place(collective: Collective) -> tuple[str, str]:
    """How often a collective is done, and its kind, which says whether it is a step of a ring.

    The loops of the traced program are in the scope. The compiler may have moved the collective out
    of them, and it makes loops of its own, in which products go round the devices in turns.
    """
    levels = loops_of(collective.scope)
    depth = min(collective.loops, len(levels) - 1)
    ring = " (a step of a ring)" if collective.loops > len(levels) - 1 else ""
    return levels[depth], collective.kind + ring


def loops_of(scope: str) -> Sequence[str]:
    """Names of the places outside and inside the loops of a scope, the outermost first."""
    if MICRO_BATCHES in scope:
        depth = len(re.findall(r"\bwhile\b", scope))
        part = "tile of the loss" if "shard_map" in scope else "layer"
        way = "backward" if "transpose(" in scope else "forward"
        return ["once", "each micro-batch", *[f"each {part}, {way}"] * (depth - 1)][: depth + 1]
    depth = len(re.findall(r"\bwhile\b", scope))
    # Only a loop of known length, which that over tokens is not, calls its body as a function.
    over_layers = re.search(r"\bwhile\b/body/closed_call", scope.partition("/while/body/while")[0])
    names = GENERATE_PROMPTS if over_layers else GENERATE_TOKENS
    return names[: depth + 1]


def show(cfg: RolloutShardings, figures: dict[str, Any]) -> None:
    axes = ", ".join(f"{name}={figures['mesh'][name]}" for name in ("dp", "fsdp", "tp"))
    title = (
        f"{cfg.model}, {cfg.prompts} x {cfg.group} completions of {cfg.completion_length} tokens "
        f"after prompts of {cfg.prompt_length}; mesh {cfg.mesh} ({axes})"
    )
    if cfg.topology is not None:
        show_table(cfg, f"Memory of each device, {cfg.topology}: {title}", memory_cells(figures))
        name = f"Sent between devices, MiB that each has afterwards, {cfg.topology}: {title}"
        show_table(cfg, name, collective_cells(figures))
        return
    where = f"{figures['devices']} x {figures['device']} on {figures['hosts']} host(s)"
    show_table(cfg, f"{title}; {where}", measured_cells(figures))
    if figures["differing_completions"]:
        print(f"{figures['differing_completions']} of {figures['completions']} completions differ.")
    elif len(cfg.styles) > 1:
        print(f"All {figures['completions']} completions are the same tokens.")
    if figures["shares_cores"]:
        print(SHARED_CORES)


def measured_cells(figures: dict[str, Any]) -> list[dict[str, str]]:
    def mib(value: int | None) -> str:
        return "unmeasured" if value is None else f"{value / MiB:,.1f}"

    return [
        {
            "rollout sharding": row["style"],
            "s a rollout": f"{row['seconds']:.3f}",
            "tokens a second": f"{row['tokens_per_s']:,.0f}",
            "in use, MiB": mib(row["bytes_in_use"]),
            "peak, MiB": mib(row["peak_bytes_in_use"]),
        }
        for row in figures["rollouts"]
    ]


def memory_cells(figures: dict[str, Any]) -> list[dict[str, str]]:
    return [
        {
            "program": row["program"],
            **{
                f"{name}, MiB": f"{row[f'{name}_bytes'] / MiB:,.1f}"
                for name in ("argument", "temporary", "output")
            },
        }
        for row in figures["memory"]
    ]


def collective_cells(figures: dict[str, Any]) -> list[dict[str, str]]:
    return [
        {
            "program": row["program"],
            "where": row["where"],
            "collective": row["kind"],
            "number": f"{row['number']:g}",
            "MiB": f"{row['bytes'] / MiB:,.3f}",
            "largest": row["largest"],
        }
        for row in figures["collectives"]
    ]


def show_table(cfg: RolloutShardings, title: str, rows: list[dict[str, str]]) -> None:
    names, text_columns = list(rows[0]), {"program", "where", "collective", "largest"}
    if cfg.markdown:
        print(f"\n{title}\n\n| {' | '.join(names)} |")
        print("|" + "".join("---|" if name in text_columns else "---:|" for name in names))
        for row in rows:
            print(f"| {' | '.join(row.values())} |")
        return
    table = Table(title=title)
    for name in names:
        table.add_column(name, justify="left" if name in text_columns else "right")
    for row in rows:
        table.add_row(*row.values())
    Console(width=None if sys.stdout.isatty() else 140, highlight=False).print(table)


if __name__ == "__main__":
    try:
        main(tyro.cli(RolloutShardings, description=__doc__))
    except UserError as error:
        sys.exit(f"error: {error}")
