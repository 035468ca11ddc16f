"""What every recipe teaches the embedded model: held-out accuracy over the steps of several seeds.

    python benchmarks/recipes.py --plot recipes.png

Prints a table, and draws a picture. A run that its folder has whole is not made again, so several
processes can share the work by `--recipes` or `--seeds`.
"""

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tyro
from jaxtyping import Float
from matplotlib.axes import Axes

from grpo_eqx import GRPOConfig, GRPOTrainer, UserError
from grpo_eqx.settings.recipes import RECIPES
from grpo_eqx.tracking.plots.style import GRID, MUTED, SERIES, dress, new_figure, plotting
from grpo_eqx.tracking.recorded_run import RecordedRun

EVAL_STEPS = 25
SAMPLED, GREEDY = "eval/temperature_1/pass@1", "eval/greedy/pass@1"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipes:
    """Which runs to make."""

    recipes: tuple[str, ...] = tuple(RECIPES)
    """Names of recipes; each runs with its default settings."""
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    """One run of each recipe for each seed."""
    output_dir: Path = Path("runs/recipes")
    """Folder of the runs, one folder each."""
    plot: Path | None = None
    """File for the picture of accuracy over steps, a PNG."""


def main(cfg: Recipes) -> None:
    runs = {
        name: [run(name, seed, cfg.output_dir / f"{name}-seed{seed}") for seed in cfg.seeds]
        for name in cfg.recipes
    }
    print(f"\nseeds {', '.join(map(str, cfg.seeds))}: mean, and least to most\n")
    print("| recipe | sampled before | sampled after | greedy before | greedy after |")
    print("|---|---|---|---|---|")
    for name, of_seeds in runs.items():
        cells = [band(curves(of_seeds, key)[:, at]) for key in (SAMPLED, GREEDY) for at in (0, -1)]
        print(f"| `{name}` | {' | '.join(cells)} |")
    if cfg.plot is not None:
        draw(runs, cfg.plot)


def run(name: str, seed: int, folder: Path) -> RecordedRun:
    """Returns a run of a recipe."""
    settings = RECIPES[name](
        seed=seed, output_dir=folder,
        eval_on_start=True, eval_steps=EVAL_STEPS, num_generations_eval=1,
    )  # fmt: skip
    return finished(settings)


def finished(settings: GRPOConfig) -> RecordedRun:
    """Returns a run that ends with an evaluation, made now if its folder does not have it whole."""
    folder = settings.output_dir
    assert folder is not None
    with contextlib.suppress(UserError):  # there is none yet
        recorded = RecordedRun.read(folder)
        if any(row["step"] == settings.steps for row in recorded.evaluations):
            return recorded
    GRPOTrainer(settings).fit()
    return RecordedRun.read(folder)


def curves(runs: Sequence[RecordedRun], metric: str) -> Float[np.ndarray, "seeds evaluations"]:
    """Accuracy of each run before training and after every `EVAL_STEPS` steps."""
    return np.array([[row[metric] for row in run.evaluations] for run in runs])


def band(accuracies: Float[np.ndarray, " seeds"]) -> str:
    mean, least, most = (100 * f(accuracies) for f in (np.mean, np.min, np.max))
    return f"{mean:.1f} % ({least:.1f}–{most:.1f})"


def draw(runs: dict[str, list[RecordedRun]], file: Path) -> None:
    """Draws a plot for each recipe: mean and range over seeds, with the other means behind it."""
    with plotting():
        figure = new_figure(960.0, 560.0)
        plots = figure.subplots(
            2, -(-len(runs) // 2), sharex=True, sharey=True, squeeze=False,
            gridspec_kw={
                "left": 0.06, "right": 0.985, "bottom": 0.09, "top": 0.84, "hspace": 0.4,
            },
        )  # fmt: skip
        for axes, name in zip(plots.flat, runs, strict=False):
            draw_recipe(axes, name, runs)
        for axes in plots[0]:
            axes.set_xlabel("")
        seeds = len(next(iter(runs.values())))
        figure.suptitle(
            f"Accuracy on held-out problems, sampled: mean and range of {seeds} seeds",
            x=0.01, ha="left",
        )  # fmt: skip
        figure.savefig(file, dpi=120, format="png")


def draw_recipe(axes: Axes, name: str, runs: dict[str, list[RecordedRun]]) -> None:
    steps = [row["step"] for row in runs[name][0].evaluations]
    for other, of_seeds in runs.items():
        if other != name:
            axes.plot(steps, curves(of_seeds, SAMPLED).mean(0), color=GRID, lw=2)
    own = curves(runs[name], SAMPLED)
    axes.fill_between(steps, own.min(0), own.max(0), color=SERIES[0], alpha=0.25, lw=0)
    axes.plot(steps, own.mean(0), color=SERIES[0], lw=2)
    dress(axes, name, share=True)
    axes.title.set_color(MUTED)


if __name__ == "__main__":
    main(tyro.cli(Recipes))
