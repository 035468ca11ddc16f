"""What the first run of the README does: accuracy before and after, and time, for several seeds.

    python benchmarks/first_run.py --seeds 0 1 2 --json first_run.json

Prints the table of the README and the tutorial. Run it alone on the machine.
"""

import dataclasses
import json
import os
import platform
from pathlib import Path

import tyro

from grpo_eqx import GRPOConfig, GRPOTrainer


@dataclasses.dataclass(frozen=True, kw_only=True)
class FirstRun:
    """Which runs to make."""

    seeds: tuple[int, ...] = (0, 1, 2)
    """One run of the default settings for each."""
    output_dir: Path = Path("runs/first_run")
    """Folder of the runs, one folder each."""
    json: Path | None = None
    """File for the figures."""


def main(cfg: FirstRun) -> None:
    rows = [run(seed, cfg.output_dir / f"seed{seed}") for seed in cfg.seeds]
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    print(f"\n{machine}\n")
    print("| seed | sampled before | sampled after | greedy before | greedy after | training |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        shares = " | ".join(
            f"{100 * row[f'{how}_{when}']:.1f} %"
            for how in ("sampled", "greedy")
            for when in ("before", "after")
        )
        print(f"| {row['seed']} | {shares} | {row['seconds']:.0f} s |")
    if cfg.json is not None:
        cfg.json.write_text(json.dumps({"machine": machine, "runs": rows}, indent=2) + "\n")


def run(seed: int, output_dir: Path) -> dict[str, float]:
    """One run of the default settings."""
    trainer = GRPOTrainer(GRPOConfig(seed=seed, output_dir=output_dir))
    before = accuracies(trainer, "before")
    result = trainer.fit()
    return {"seed": seed, "seconds": result.seconds, **before, **accuracies(trainer, "after")}


def accuracies(trainer: GRPOTrainer, when: str) -> dict[str, float]:
    """On the held-out problems, sampled at temperature 1 and greedy."""
    return {
        f"sampled_{when}": trainer.evaluate(temperature=1.0).accuracy,
        f"greedy_{when}": trainer.evaluate().accuracy,
    }


if __name__ == "__main__":
    main(tyro.cli(FirstRun))
