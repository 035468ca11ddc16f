"""What stale tokens cost the embedded model: held-out accuracy over trained tokens, by seeds.

    python benchmarks/staleness.py --plot staleness.png

Slots for all completions of `max_staleness` steps make tokens as stale as that setting allows.
Prints a table, and draws a picture. A run that its folder has whole is not made again, so several
processes can share the work by `--seeds`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import tyro
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from recipes import band, finished

from grpo_eqx import GRPOConfig
from grpo_eqx.tracking.plots.style import GRID, MUTED, SERIES, dress, new_figure, plotting
from grpo_eqx.tracking.recorded_run import RecordedRun

EVAL_STEPS = 15
ACCURACY, REWARD, TOKENS = "eval/temperature_1/pass@1", "reward", "num_tokens"
LAST_STEPS = 10
"""Steps whose mean reward is compared."""
SYNCHRONOUS = "synchronous"
POINTS = 60


@dataclasses.dataclass(frozen=True, kw_only=True)
class Staleness:
    """Which runs to make."""

    staleness: tuple[int, ...] = (1, 2, 4)
    """Values of max_staleness, beside 0."""
    corrections: tuple[str, ...] = ("none", "token_truncate")
    """Values of importance_sampling_mode."""
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    output_dir: Path = Path("runs/staleness")
    """Folder of the runs, one folder each."""
    plot: Path | None = None
    """File for the picture, a PNG."""


def main(cfg: Staleness) -> None:
    runs = {
        name: [run(changes, seed, cfg.output_dir / f"{name}-seed{seed}") for seed in cfg.seeds]
        for name, changes in settings(cfg).items()
    }
    # Runs have trained on almost as many tokens after as many steps.
    tokens = min(each.steps[-1][TOKENS] for of_seeds in runs.values() for each in of_seeds)
    print(
        f"\nseeds {', '.join(map(str, cfg.seeds))}, after {tokens:,.0f} tokens: mean, and least to "
        f"most; rewards are of the last {LAST_STEPS} steps\n"
    )
    print("| run | staleness | reward | overlaps | held out, sampled | overlaps |")
    print("|---|---|---|---|---|---|")
    first = [at_tokens(runs[SYNCHRONOUS], tokens, key) for key in (REWARD, ACCURACY)]
    for name, of_seeds in runs.items():
        own = [at_tokens(of_seeds, tokens, key) for key in (REWARD, ACCURACY)]
        cells = [x for a, b in zip(own, first, strict=True) for x in (band(a), overlap(a, b))]
        print(f"| {name} | {mean_staleness(of_seeds):.2f} | {' | '.join(cells)} |")
    if cfg.plot is not None:
        draw(runs, tokens, cfg.plot)


def settings(cfg: Staleness) -> dict[str, dict[str, Any]]:
    """Returns what each kind of run changes."""
    completions = GRPOConfig().prompts_per_step * GRPOConfig().num_generations
    changed = {
        f"{staleness}, {mode}": {
            "max_staleness": staleness,
            "importance_sampling_mode": mode,
            "max_num_seqs": staleness * completions,
        }
        for staleness in cfg.staleness
        for mode in cfg.corrections
    }
    return {SYNCHRONOUS: {}, **changed}


def run(changes: Mapping[str, Any], seed: int, folder: Path) -> RecordedRun:
    """Returns a run with some settings changed."""
    cfg = GRPOConfig(
        seed=seed, output_dir=folder, eval_on_start=True, eval_steps=EVAL_STEPS,
        num_generations_eval=1, **changes,
    )  # fmt: skip
    return finished(cfg)


def mean_staleness(runs: Sequence[RecordedRun]) -> float:
    return fmean(row.get("staleness/mean", 0.0) for each in runs for row in each.steps)


def curve(run: RecordedRun, metric: str) -> tuple[list[float], list[float]]:
    """Returns the trained tokens and the values of a metric of a run, reward as a moving mean."""
    tokens = {0: 0.0, **{row["step"]: row[TOKENS] for row in run.steps}}
    if metric == ACCURACY:
        rows = run.evaluations
        return [tokens[row["step"]] for row in rows], [row[metric] for row in rows]
    rewards = [row[metric] for row in run.steps]
    means = [fmean(rewards[max(0, i - LAST_STEPS + 1) : i + 1]) for i in range(len(rewards))]
    return [row[TOKENS] for row in run.steps], means


def at_tokens(
    runs: Sequence[RecordedRun], tokens: float | Float[np.ndarray, " n"], metric: str
) -> Float[np.ndarray, "..."]:
    """Returns a metric of each run after so many trained tokens, between steps a straight line."""
    return np.array([np.interp(tokens, *curve(run, metric)) for run in runs])


def overlap(values: Float[np.ndarray, " seeds"], others: Float[np.ndarray, " seeds"]) -> str:
    return "yes" if values.min() <= others.max() and others.min() <= values.max() else "no"


def draw(runs: dict[str, list[RecordedRun]], tokens: float, file: Path) -> None:
    """Draws a plot for each kind of run beside the synchronous one: mean and range over seeds."""
    first, *others = runs
    with plotting():
        figure = new_figure(960.0, 620.0)
        columns = -(-len(others) // 2)
        plots = figure.subplots(
            2, columns, sharex=True, sharey=True, squeeze=False,
            gridspec_kw={
                "left": 0.06, "right": 0.985, "bottom": 0.09, "top": 0.84, "hspace": 0.4,
            },
        )  # fmt: skip
        for axes, name in zip(plots.T.flat, others, strict=False):
            draw_beside(axes, name, runs[name], runs[first], tokens)
        for axes in plots[0]:
            axes.set_xlabel("")
        seeds = len(runs[first])
        figure.suptitle(
            f"Accuracy on held-out problems, sampled: mean and range of {seeds} seeds; synchronous "
            f"runs in gray",
            x=0.01, ha="left",
        )  # fmt: skip
        figure.savefig(file, dpi=120, format="png")


def draw_beside(
    axes: Axes, name: str, own: list[RecordedRun], first: list[RecordedRun], tokens: float
) -> None:
    at = np.linspace(0.0, tokens, POINTS)
    for runs, color in ((first, MUTED), (own, SERIES[0])):
        values = at_tokens(runs, at, ACCURACY)
        axes.fill_between(at / 1e6, values.min(0), values.max(0), color=color, alpha=0.25, lw=0)
        axes.plot(at / 1e6, values.mean(0), color=color, lw=2)
    dress(axes, f"max_staleness {name}", share=True)
    axes.set_xlabel("million tokens")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5))
    axes.title.set_color(MUTED)
    axes.grid(axis="y", color=GRID)


if __name__ == "__main__":
    main(tyro.cli(Staleness))
