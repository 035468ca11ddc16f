"""What every recipe teaches the embedded model: accuracy before and after, for several seeds.

    python benchmarks/recipes.py --seeds 0 1 --json recipes.json

Prints the table of the recipes' guide. About 40 minutes on two cores.
"""

import dataclasses
import json
from pathlib import Path

import tyro
from first_run import accuracies

from grpo_eqx import GRPOTrainer
from grpo_eqx.recipes import RECIPES


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipes:
    """Which runs to make."""

    recipes: tuple[str, ...] = tuple(RECIPES)
    """Names of recipes; each runs with its default settings."""
    seeds: tuple[int, ...] = (0, 1)
    """One run of each recipe for each seed."""
    output_dir: Path = Path("runs/recipes")
    """Folder of the runs, one folder each."""
    json: Path | None = None
    """File for the figures."""


def main(cfg: Recipes) -> None:
    rows = [
        run(name, seed, cfg.output_dir / f"{name}-seed{seed}")
        for name in cfg.recipes
        for seed in cfg.seeds
    ]
    print()
    print(
        "| recipe | seed | sampled before | sampled after | gain | greedy before | greedy after |"
    )
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        before, after = 100 * row["sampled_before"], 100 * row["sampled_after"]
        print(
            f"| `{row['recipe']}` | {row['seed']} | {before:.1f} % | {after:.1f} % | "
            f"{after - before:+.1f} | {100 * row['greedy_before']:.1f} % | "
            f"{100 * row['greedy_after']:.1f} % |"
        )
    if cfg.json is not None:
        cfg.json.write_text(json.dumps(rows, indent=2) + "\n")


def run(name: str, seed: int, output_dir: Path) -> dict[str, float | str]:
    """One run of a recipe as it is."""
    trainer = GRPOTrainer(RECIPES[name](seed=seed, output_dir=output_dir))
    before = accuracies(trainer, "before")
    trainer.fit()
    return {"recipe": name, "seed": seed, **before, **accuracies(trainer, "after")}


if __name__ == "__main__":
    main(tyro.cli(Recipes))
