"""Learning curve: reward and completion length over the steps of a run."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from grpo_eqx.tracking.plots.series import Course, window


def plot_learning_curve(
    history: Sequence[Mapping[str, float]], title: str, path: Path, first: int = 1
) -> None:
    """Plots reward and mean completion length by step, with running means, as a PNG.

    **Arguments:**

    - `history`: the metrics of each step, with the step's number as `step`.
    - `title`: the title of the plot.
    - `path`: the file.
    - `first`: the number of the first step, used for metrics without `step`.
    """
    # Importing matplotlib takes half a second, for which a run need not wait.
    from grpo_eqx.tracking.plots.style import SERIES, dress, new_figure, plotting

    written = path.with_suffix(".tmp")
    # Steps may be missing where damaged records of a resumed run were left out.
    steps = np.array([x.get("step", first + i) for i, x in enumerate(history)], float)
    with plotting():
        figure = new_figure(720.0, 540.0)
        room = {"left": 0.09, "right": 0.985, "bottom": 0.09, "top": 0.88, "hspace": 0.25}
        shapes: Any = {"height_ratios": (2, 1), **room}
        top, bottom = figure.subplots(2, 1, sharex=True, gridspec_kw=shapes)
        for axes, name, label, color in (
            (top, "reward", "mean reward", SERIES[0]),
            (bottom, "completions/mean_length", "mean length, tokens", SERIES[1]),
        ):
            values = np.array([metrics.get(name, math.nan) for metrics in history], float)
            course = Course(steps, values)
            each, mean = course.thinned(), course.smooth().thinned()
            axes.plot(each.steps, each.values, color=color, alpha=0.3, lw=1, label="each step")
            mean_of = f"mean of last {window(len(history))}"
            axes.plot(mean.steps, mean.values, color=color, lw=2, label=mean_of)
            dress(axes, label)
        figure.suptitle(title, x=0.01, ha="left")
        top.legend(loc="lower right")
        top.set_xlabel("")
        bottom.set_ylim(bottom=0)
        bottom.set_xlim(steps[0] - 1, steps[-1] + 1)
        figure.savefig(written, dpi=120, format="png")
    written.replace(path)  # so that nobody sees half a picture while the run goes on
