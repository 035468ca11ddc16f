r"""Where runs that ran out of memory on rented TPUs stand now, without renting any.

    python benchmarks/seed_cliffs.py                     # all of it, about an hour on two cores
    python benchmarks/seed_cliffs.py --parts 3b-v6e-8 --markdown cliffs.md

Needs the `plan` extra. Everything is planned as `grpo-eqx plan` does: by compiling the programs of
the run for the TPU. Parameters are float32 and computed with in bfloat16.

3b-v6e-8: Qwen2.5-3B, completions of 2,048 tokens, by loss backend and micro-batch. A system whose
loss has all logits, or a kernel that still makes them, fits 3 completions a device and not 4.
7b-v4-16: Qwen2.5-7B, prompts of 2,048 and completions of 128 tokens. The same fits 1 sequence a
device and not 2. Groups of 8 share their prompt's keys and values; groups of 2 hardly do.
large: whether larger models fit larger slices, and with what micro-batch.
"""

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import tyro

from grpo_eqx import GRPOConfig
from grpo_eqx.planner import Plan
from grpo_eqx.planner.planning_process import ask

GiB = 2**30
Part = Literal["3b-v6e-8", "7b-v4-16", "large"]

SEED_BATCH = {"prompts_per_step": 8, "num_generations": 12}
"""96 completions: the batch of the runs that ran out, 12 on each of 8 devices."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeedCliffs:
    """What to plan."""

    parts: tuple[Part, ...] = ("3b-v6e-8", "7b-v4-16", "large")
    """Which tables."""
    markdown: Path | None = None
    """File for the tables."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One plan, and how it is shown."""

    cells: tuple[str, ...]
    plan: Plan


def main(work: SeedCliffs) -> None:
    tables = {"3b-v6e-8": of_3b, "7b-v4-16": of_7b, "large": of_large}
    texts = [table(*tables[part]()) for part in work.parts]
    if work.markdown is not None:
        work.markdown.write_text("\n".join(texts))


def config(size: str, **settings: Any) -> GRPOConfig:
    return GRPOConfig(model=f"Qwen/Qwen2.5-{size}-Instruct", **settings)


def say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


def of_3b() -> tuple[Sequence[str], Iterator[Row]]:
    lengths = {"max_prompt_length": 256, "max_completion_length": 2048, "optimizer": "lion"}
    sizes = {"dense": (2, 4, 8, 16), "chunked": (4, 16, 32, 64), "pallas": (4, 16, 32, 64)}

    def rows() -> Iterator[Row]:
        for backend, tried in sizes.items():
            for size in tried:
                batch = SEED_BATCH if size < 8 else {"prompts_per_step": 64}
                cfg = config(
                    "3B", micro_batch_size_per_device=size, loss_backend=backend, **batch, **lengths
                )
                plan = ask(cfg, "v6e-8", say, help_if_not=False)
                yield Row((backend, str(plan.micro_batch_size)), plan)

    return ("loss backend", "micro-batch"), rows()


def of_7b() -> tuple[Sequence[str], Iterator[Row]]:
    lengths = {"max_prompt_length": 2048, "max_completion_length": 128, "optimizer": "lion"}

    def rows() -> Iterator[Row]:
        for group in (8, 2):
            for size in (2, 8, 16, 32):
                prompts = 512 // group
                cfg = config(
                    "7B", prompts_per_step=prompts, num_generations=group,
                    micro_batch_size_per_device=size, **lengths,
                )  # fmt: skip
                plan = ask(cfg, "v4-16", say, help_if_not=False)
                yield Row((str(group), str(plan.micro_batch_size)), plan)

    return ("num_generations", "micro-batch"), rows()


def of_large() -> tuple[Sequence[str], Iterator[Row]]:
    lengths = {"max_prompt_length": 256, "max_completion_length": 2048}

    def rows() -> Iterator[Row]:
        for size, topology, prompts in (
            ("7B", "v6e-16", 32), ("14B", "v6e-16", 32),
            ("32B", "v6e-256", 256), ("72B", "v6e-256", 256),
        ):  # fmt: skip
            cfg = config(size, prompts_per_step=prompts, **lengths)
            plan = ask(cfg, topology, say, "micro_batch_size_per_device")
            assert plan.found is not None
            cells = f"Qwen2.5-{size}", topology, f"{prompts} x 8", str(plan.found.largest)
            yield Row(cells, plan)

    return ("model", "TPU", "prompts x group", "largest micro-batch"), rows()


def table(names: Sequence[str], rows: Iterator[Row]) -> str:
    """Prints rows as they come; returns all as Markdown."""
    figures: dict[str, Callable[[Plan], str]] = {
        "fits": lambda plan: "yes" if plan.fits else "no",
        "peak GiB": lambda plan: f"{plan.peak_bytes / GiB:.2f}",
        "of": lambda plan: f"{plan.hbm_bytes / GiB:.2f}",
        "in": lambda plan: max(plan.programs, key=lambda x: plan.programs[x].peak_bytes),
    }
    lines = [line([*names, *figures]), line(["---"] * (len(names) + len(figures)))]
    print("\n".join(lines))
    for row in rows:
        lines.append(line([*row.cells, *(figure(row.plan) for figure in figures.values())]))
        print(lines[-1], flush=True)
    return "\n".join(lines) + "\n"


def line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main(tyro.cli(SeedCliffs, description=__doc__))
