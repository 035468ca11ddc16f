r"""Plans Qwen models on TPU slices that people rent: memory, time at peak rates, chip-hours.

    python benchmarks/planned_runs.py                              # all of it
    python benchmarks/planned_runs.py --only Qwen3-8B:v6e-8 Qwen2.5-3B:v6e-8

Needs the `plan` extra, and minutes for each row. Every row is `grpo-eqx plan` with default settings
apart from the lengths: 64 prompts of at most 256 tokens with 8 completions of 512, all parameters
trained with AdamW, meshes, micro-batches and rollout shardings chosen by the planner. A run that
was planned before with the same code is not planned again.
"""

import dataclasses
import sys

import tyro

from grpo_eqx import GRPOConfig
from grpo_eqx.planner.planning_process import ask
from grpo_eqx.planner.report import shown, shown_seconds

RUNS = {
    "Qwen2.5-0.5B": ("v6e-1", "v5e-4"),
    "Qwen2.5-1.5B": ("v5e-4", "v6e-4"),
    "Qwen2.5-3B": ("v5e-8", "v6e-8"),
    "Qwen2.5-7B": ("v6e-8",),
    "Qwen3-0.6B": ("v6e-1",),
    "Qwen3-1.7B": ("v5e-4",),
    "Qwen3-4B": ("v6e-8",),
    "Qwen3-8B": ("v6e-16",),
    "Qwen3-14B": ("v6e-16",),
}
"""TPU slices by model."""
STEPS = 1000


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedRuns:
    """Which runs to plan."""

    only: tuple[str, ...] = tuple(f"{model}:{tpu}" for model in RUNS for tpu in RUNS[model])
    """Models and slices, as MODEL:SLICE."""


def main(work: PlannedRuns) -> None:
    print("| model | TPU | mesh | rollout | peak GiB | of | a step | chip-hours per 1,000 steps |")
    print("|---|---|---|---|---:|---:|---:|---:|")
    for run in work.only:
        model, _, tpu = run.partition(":")
        print(row(model, tpu), flush=True)


def row(model: str, tpu: str) -> str:
    suffix = "-Instruct" if "2.5" in model else ""
    cfg = GRPOConfig(
        model=f"Qwen/{model}{suffix}", prompts_per_step=64, num_generations=8,
        max_prompt_length=256, max_completion_length=512,
    )  # fmt: skip
    plan = ask(cfg, tpu, say, help_if_not=False, evaluates=False)
    peak, hbm = (f"{size / 2**30:.2f}" for size in (plan.peak_bytes, plan.hbm_bytes))
    time, hours = "does not fit", "-"
    if plan.fits:
        assert plan.step_time is not None  # the rates of TPUs are known
        seconds = plan.step_time.total
        time = shown_seconds(seconds)
        hours = shown(seconds.times(STEPS * plan.num_devices / 3600), ",.1f")
    mesh = ", ".join(f"{axis} {size}" for axis, size in plan.mesh.items() if size > 1) or "1"
    rollout = plan.rollout_sharding.partition(": ")[0]
    return f"| {' | '.join((model, tpu, mesh, rollout, peak, hbm, time, hours))} |"


def say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(tyro.cli(PlannedRuns, description=__doc__))
