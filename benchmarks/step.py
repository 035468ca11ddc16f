"""Time of a GRPO step, beside another library's on the same work.

    python benchmarks/step.py --workload fixed
    python benchmarks/step.py --workload ragged --peer trl --peer-python PATH --json step.json
    python benchmarks/step.py --workload many --model 0.5B --peer trl --peer-python PATH  # a GPU

A step is everything: sampling from the full softmax, rewards, log-probs, gradients, clipping and
AdamW, for a Qwen2 with random weights. We and the peer take turns, each in a process and an
environment of its own; times are medians over all timed steps, after untimed ones that compile.
Run it alone on the machine.
"""

import dataclasses
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import tyro
from rich.console import Console
from rich.table import Table

from grpo_eqx import UserError

WORKERS = Path(__file__).parent / "step_workers"
CEILINGS = Path(__file__).with_name("ceilings.py")
WORKLOADS: dict[str, dict[str, int]] = {
    "fixed": {
        "prompt_length": 64, "completion_length": 128, "prompts": 4, "group": 8,
        "micro_batch": 32, "vocabulary": 8192,
    },
    "ragged": {
        "prompt_length": 64, "completion_length": 512, "prompts": 4, "group": 8,
        "micro_batch": 32, "vocabulary": 128,
    },
    "long-prompt": {
        "prompt_length": 512, "completion_length": 128, "prompts": 2, "group": 16,
        "micro_batch": 32, "vocabulary": 8192,
    },
    "many": {
        "prompt_length": 128, "completion_length": 256, "prompts": 32, "group": 8,
        "micro_batch": 16, "vocabulary": 151_936,
    },
}  # fmt: skip
WARMUP_STEPS = 2
"""Untimed ones."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """What to time."""

    workload: Literal["fixed", "ragged", "long-prompt", "many"] = "fixed"
    """Completions of 128 tokens; of up to 512, about 126 in the mean; of 128 after long prompts;
    256 of 256 tokens, for an accelerator."""
    model: Literal["small", "0.5B", "3B"] = "small"
    """4.2 million parameters and the embedding's; or the shapes of Qwen2.5."""
    peer: Literal["trl", "tunix"] | None = None
    """Library to compare with."""
    peer_python: Path | None = None
    """Its interpreter."""
    steps: int = 5
    """Timed steps of a process."""
    rounds: int = 2
    """Processes of each side."""
    json: Path | None = None
    """File for the figures."""

    def __post_init__(self) -> None:
        if (self.peer is None) != (self.peer_python is None):
            raise UserError("peer and peer_python belong together: give both, or neither.")
        if self.peer_python is not None and shutil.which(self.peer_python) is None:
            raise UserError(
                f"peer_python {str(self.peer_python)!r} is no program: name its python."
            )
        for name in ("steps", "rounds"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}: it must be at least 1.")


def main(cfg: Step) -> None:
    sizes = WORKLOADS[cfg.workload]
    if cfg.peer == "tunix" and sizes["micro_batch"] < sizes["prompts"] * sizes["group"]:
        raise UserError(
            "with micro-batches the end of a step of tunix cannot be told: use another workload."
        )
    work = json.dumps(
        {**sizes, "model": cfg.model, "steps": cfg.steps, "warmup_steps": WARMUP_STEPS}
    )
    runs: dict[str, list[dict[str, Any]]] = {"ours": [], "peer": []}
    for _ in range(cfg.rounds):
        runs["ours"].append(time_steps(sys.executable, "ours", work))
        if cfg.peer is not None:
            runs["peer"].append(time_steps(str(cfg.peer_python), cfg.peer, work))
    medians = {
        side: statistics.median(s for run in made for s in run["seconds"])
        for side, made in runs.items()
        if made
    }
    figures = {
        "workload": cfg.workload,
        "model": cfg.model,
        "peer": cfg.peer,
        "ours_s": medians["ours"],
        "peer_s": medians.get("peer"),
        "ratio": medians["peer"] / medians["ours"] if cfg.peer else None,
        "parts": {
            name: statistics.fmean(run["parts"][name] for run in runs["ours"])
            for name in runs["ours"][0]["parts"]
        },
        "runs": runs,
    }
    figures["shares"] = shares_of_ceilings(figures["parts"], runs["ours"][0])
    show(figures)
    if cfg.json is not None:
        cfg.json.write_text(json.dumps(figures, indent=2) + "\n")


def time_steps(python: str, side: str, work: str) -> dict[str, Any]:
    """The figures that a worker prints as its last line."""
    command = [python, str(WORKERS / f"{side}_worker.py"), work]
    one_gpu = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **one_gpu})
    if done.returncode:
        sys.stderr.write(done.stderr[-4000:])
        hint = "" if side == "ours" else f": is {side} installed there?"
        raise UserError(f"{' '.join(command[:2])} failed, as above{hint}")
    return json.loads(done.stdout.splitlines()[-1])


def shares_of_ceilings(parts: dict[str, float], run: dict[str, Any]) -> dict[str, float] | None:
    """Of what plain programs reach on the device.

    Decoding's share is of the memory bandwidth and counts the prefill's time too; the update's are
    of the matrix rate, the vendor's (which MFU is) and the one that is reached. Where the vendor's
    rates are unknown, as a CPU's, both parts' are of the matrix rate in float32, by the model's
    FLOPs.
    """
    peaks = run["peaks"]
    dtype = "float32" if peaks is None else "bfloat16"
    command = [sys.executable, str(CEILINGS), "--dtype", dtype]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.stderr.write(f"ceilings.py failed:\n{done.stderr[-4000:]}")
        return None
    ceilings = json.loads(done.stdout.splitlines()[-1])
    if peaks is None:
        rates = {part: x / parts[f"time/train/{part}_s"] for part, x in run["flops"].items()}
        of = f"of the measured matrix rate, {ceilings['flops_per_s'] / 1e9:.0f} GFLOP/s"
        return {
            f"{part}: {rate / 1e9:.0f} GFLOP/s, {of}": rate / ceilings["flops_per_s"]
            for part, rate in rates.items()
        }
    mfu, bandwidth = (
        parts[f"perf/{name}"] for name in ("mfu/update", "bandwidth_utilization/rollout")
    )
    return {
        "decoding, of the measured bandwidth": bandwidth
        * peaks["bytes_per_second"]
        / ceilings["bytes_per_s"],
        "update, MFU": mfu,
        "update, of the measured matrix rate": mfu
        * peaks["flops_per_second"]
        / ceilings["flops_per_s"],
    }


def show(figures: dict[str, Any]) -> None:
    table = Table(title=f"A GRPO step, {figures['workload']}, {figures['model']} model")
    for column in ("", "median", "fastest", "slowest", "mean length", "untimed before"):
        table.add_column(column, justify="right" if column else "left")
    for side, runs in figures["runs"].items():
        if not runs:
            continue
        seconds = [s for run in runs for s in run["seconds"]]
        name = "grpo_eqx" if side == "ours" else f"{figures['peer']} {runs[0]['version']}"
        lengths = [run["mean_length"] for run in runs]
        table.add_row(
            name,
            *(f"{x:.2f} s" for x in (statistics.median(seconds), min(seconds), max(seconds))),
            "-" if None in lengths else f"{statistics.fmean(lengths):.0f}",
            f"{runs[0]['untimed_steps']} steps, {runs[0]['untimed_seconds']:.0f} s",
        )
    console = Console(width=None if sys.stdout.isatty() else 100, highlight=False)
    console.print(table)
    parts = figures["parts"]
    laps = [f"time/train/{lap}_s" for lap in ("rollout", "reward", "update")]
    times = {name: parts[name] for name in laps}
    console.print(
        "of ours, in the mean: "
        + ", ".join(f"{name.split('/')[-1][:-2]} {value:.2f} s" for name, value in times.items())
    )
    for name, share in (figures["shares"] or {}).items():
        console.print(f"{name}: {share:.0%}")
    if figures["ratio"] is not None:
        console.print(f"{figures['ratio']:.2f} times as fast")


if __name__ == "__main__":
    try:
        main(tyro.cli(Step, description=__doc__))
    except UserError as error:
        sys.exit(f"error: {error}")
