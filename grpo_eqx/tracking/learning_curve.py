"""Learning curve: reward and completion length over the steps of a run."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

_BLUE, _ORANGE = "#2b6cb0", "#c05621"


def plot_learning_curve(
    history: Sequence[Mapping[str, float]], title: str, path: Path, first: int = 1
) -> None:
    """Plots reward and mean completion length by step, with running means, as a PNG.

    **Arguments:** the metrics of consecutive steps; the title; the file; the number of the first
    of these steps.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    steps = np.arange(first, first + len(history))
    for axes, name, label, color in (
        (top, "reward", "mean reward", _BLUE),
        (bottom, "completions/mean_length", "length (tokens)", _ORANGE),
    ):
        values = np.array([metrics[name] for metrics in history])
        axes.plot(steps, values, color=color, alpha=0.3, linewidth=1, label="each step")
        mean, window = _running_mean(values)
        axes.plot(steps, mean, color=color, linewidth=2, label=f"mean of last {window}")
        axes.set_ylabel(label)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    top.set_title(title, loc="left")
    top.legend(frameon=False, loc="lower right")
    bottom.set_xlabel("step")
    bottom.set_ylim(bottom=0)
    bottom.set_xlim(first - 1, first + len(history))
    written = path.with_suffix(".tmp")
    figure.savefig(written, dpi=150, format="png")
    written.replace(path)  # whole, for those who look while the run goes on


def _running_mean(values: np.ndarray) -> tuple[np.ndarray, int]:
    """Averages each value with up to `window - 1` before it; returns the means and the window."""
    window = max(1, min(10, len(values) // 5))
    sums = np.cumsum(np.insert(values, 0, 0.0))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - window, 0)
    return (sums[ends] - sums[starts]) / (ends - starts), window
