r"""The same GRPO run on one host and on several: seconds a step and tokens a second.

    python benchmarks/pod_scaling.py --json one.json                     # on one host
    python benchmarks/pod_scaling.py --json four.json                    # on every host of a pod
    grpo-eqx launch local --processes 4 --devices-per-process 4 -- \
        python benchmarks/pod_scaling.py --json simulated.json           # a simulated pod
    python benchmarks/pod_scaling.py --compare one.json four.json

All flags of a training run are there (--model, --data, --mesh, --rollout-sharding). Tokens are
those of completions. Steps in which something was compiled are not counted. Only the first process
writes. Run it alone on the machine.
"""

import dataclasses
import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tyro
from device_facts import SHARED_CORES, device_facts
from rich.console import Console
from rich.table import Table

from grpo_eqx import GRPOConfig, GRPOTrainer, UserError
from grpo_eqx.distributed import is_main

OWN_OF_A_RUN = {
    "output_dir",
    "require_processes",
    "start_timeout",
    "report_to",
    "wandb",
    "wandb_project",
}
"""Settings in which compared runs may differ, with those of the layout."""
OF_THE_LAYOUT = {"mesh", "rollout_sharding", "micro_batch_size_per_device"}


def short_run() -> GRPOConfig:
    return GRPOConfig(steps=12, log_completions_steps=0, output_dir="runs/pod_scaling")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PodScaling:
    """What to run, or what to compare."""

    run: tyro.conf.OmitArgPrefixes[GRPOConfig] = dataclasses.field(default_factory=short_run)
    """The training run."""
    compare: tuple[Path, ...] = ()
    """Figures of two or more runs: nothing runs, and they are compared with the first."""
    json: Path | None = None
    """File for the figures."""


def main(cfg: PodScaling) -> None:
    if cfg.compare:
        compare([json.loads(path.read_text()) for path in cfg.compare])
        return
    figures = run(cfg.run)
    if is_main():
        show([figures])
        if cfg.json is not None:
            cfg.json.write_text(json.dumps(figures, indent=2) + "\n")


def run(cfg: GRPOConfig) -> dict[str, Any]:
    """Trains, and what the steps took that compiled nothing."""
    trainer = GRPOTrainer(cfg)
    history = trainer.fit().history
    completions = cfg.prompts_per_step * cfg.num_generations
    tokens = [round(step["completions/mean_length"] * completions) for step in history]
    counted = [i for i, step in enumerate(history) if step["compile/num_programs"] == 0]
    if not counted:
        raise UserError(f"all {len(history)} steps compiled something: give it more --steps.")
    facts = device_facts()
    seconds = [history[i]["step_time"] for i in counted]
    tokens_per_s = sum(tokens[i] for i in counted) / sum(seconds)
    settings = {name: str(value) for name, value in dataclasses.asdict(cfg).items()}
    return {
        **facts,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "axes": dict(trainer.mesh.shape),
        "rollout_sharding": trainer.layout().rollout_sharding.partition(":")[0],
        "seconds_per_step": statistics.median(seconds),
        "tokens_per_s": tokens_per_s,
        "tokens_per_s_per_device": tokens_per_s / facts["devices"],
        "steps": counted,
        "seconds": [step["step_time"] for step in history],
        "tokens": tokens,
        "rewards": [step["reward"] for step in history],
        "settings": settings,
    }


def compare(runs: Sequence[dict[str, Any]]) -> None:
    """Prints the runs beside the first; refuses those of other work."""
    if len(runs) < 2:
        raise UserError("compare takes the figures of two or more runs.")
    first = runs[0]["settings"]
    for other in runs[1:]:
        for name, value in first.items():
            same = other["settings"].get(name) == value
            if not same and name not in OWN_OF_A_RUN | OF_THE_LAYOUT:
                raise UserError(
                    f"the runs differ in {name}: {value} and {other['settings'].get(name)}. "
                    f"Compare runs of the same work."
                )
    show(runs)
    same = all(each["tokens"] == runs[0]["tokens"] for each in runs)
    print(f"The runs generated {'the same' if same else 'different'} numbers of tokens.")


def show(runs: Sequence[dict[str, Any]]) -> None:
    table = Table(title="The same GRPO run on different devices; ratios are to the first")
    table.add_column("devices")
    for column in ("mesh", "s a step", "tokens a s", "a device", "speed", "speed a device"):
        table.add_column(column, justify="right")
    for each in runs:
        speed, of_device = (
            each[name] / runs[0][name] for name in ("tokens_per_s", "tokens_per_s_per_device")
        )
        table.add_row(
            f"{each['devices']} x {each['device']} on {each['hosts']} host(s)",
            ",".join(str(size) for size in each["axes"].values()) + f" {each['rollout_sharding']}",
            f"{each['seconds_per_step']:.2f}",
            f"{each['tokens_per_s']:,.0f}",
            f"{each['tokens_per_s_per_device']:,.1f}",
            f"{speed:.2f}",
            f"{of_device:.2f}",
        )
    Console(width=None if sys.stdout.isatty() else 110, highlight=False).print(table)
    if any(each["shares_cores"] for each in runs):
        print(SHARED_CORES)


if __name__ == "__main__":
    try:
        main(tyro.cli(PodScaling, description=__doc__))
    except UserError as error:
        sys.exit(f"error: {error}")
