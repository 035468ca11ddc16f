"""What the examples with tools and environments learn: held-out accuracy over the steps.

    python benchmarks/agents.py --plot agents.png

Prints a table, and draws a picture. Run it alone on the machine.
"""

import dataclasses
import runpy
from itertools import islice
from pathlib import Path

import tyro

from grpo_eqx import GRPOTrainer
from grpo_eqx.tracking.plots.style import MUTED, SERIES, dress, new_figure, plotting
from grpo_eqx.tracking.recorded_run import RecordedRun

EXAMPLES = Path(__file__).parents[1] / "examples"
SAMPLED = "eval/temperature_1/pass@1"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agents:
    """Which runs to make."""

    seeds: tuple[int, ...] = (0, 1)
    """One run of each example for each."""
    output_dir: Path = Path("runs/agents")
    """Folder of the runs, one folder each."""
    plot: Path | None = None
    """File for the picture of accuracy over steps, a PNG."""


def main(cfg: Agents) -> None:
    runs = {
        name: [run(name, seed, cfg.output_dir / f"{name}-seed{seed}") for seed in cfg.seeds]
        for name in ("calculator", "no calculator", "higher_lower")
    }
    print("\n| example | seed | before | after | training |")
    print("|---|---|---|---|---|")
    for name, of_seeds in runs.items():
        for seed, (seconds, recorded) in zip(cfg.seeds, of_seeds, strict=True):
            before, after = (100 * recorded.evaluations[i][SAMPLED] for i in (0, -1))
            print(f"| {name} | {seed} | {before:.1f} % | {after:.1f} % | {seconds:.0f} s |")
    if cfg.plot is not None:
        draw({name: [x for _, x in of_seeds] for name, of_seeds in runs.items()}, cfg.plot)


def run(name: str, seed: int, folder: Path) -> tuple[float, RecordedRun]:
    """Trains an example; returns the seconds of its steps, and what it recorded."""
    evaluates = {"eval_on_start": True, "eval_steps": 10, "num_generations_eval": 1}
    settings = {"seed": seed, "output_dir": folder, **evaluates}
    if name == "higher_lower":
        example = runpy.run_path(str(EXAMPLES / "higher_lower.py"))
        cfg = example["HigherLowerConfig"](**settings)
        trainer = GRPOTrainer(cfg, environment_factory=example["HigherLower"])
    else:
        example = runpy.run_path(str(EXAMPLES / "calculator.py"))
        trainer = GRPOTrainer(
            example["CalculatorConfig"](**settings),
            tools=[example["calculate"]] if name == "calculator" else None,
            train_data=list(islice(example["problems"](), 4096)),
            eval_data=list(islice(example["problems"](heldout=True), 256)),
        )
    seconds = trainer.fit().seconds
    return seconds, RecordedRun.read(folder)


def draw(runs: dict[str, list[RecordedRun]], file: Path) -> None:
    """Draws the calculator with and without tool, and beside it the game: a line per seed."""
    with plotting():
        figure = new_figure(960.0, 340.0)
        plots = figure.subplots(
            1, 2, sharey=True,
            gridspec_kw={"left": 0.06, "right": 0.985, "bottom": 0.16, "top": 0.86},
        )  # fmt: skip
        panels = {
            "Calculator: problems solved": ("calculator", "no calculator"),
            "Higher or lower: games won": ("higher_lower",),
        }
        for axes, (title, names) in zip(plots, panels.items(), strict=True):
            for color, name in zip(SERIES, names, strict=False):
                for recorded in runs[name]:
                    steps = [row["step"] for row in recorded.evaluations]
                    line = [row[SAMPLED] for row in recorded.evaluations]
                    axes.plot(steps, line, color=color, lw=2)
                if len(names) > 1:
                    label = "with the tool" if name == "calculator" else "without"
                    axes.annotate(label, (steps[-1], line[-1]), (-4, 14), ha="right",
                                  textcoords="offset points", color=color)  # fmt: skip
            dress(axes, title, share=True)
            axes.title.set_color(MUTED)
        figure.savefig(file, dpi=120, format="png")


if __name__ == "__main__":
    main(tyro.cli(Agents))
