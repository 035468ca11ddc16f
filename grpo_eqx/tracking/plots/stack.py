"""Plot of what the time of a run's steps is spent on."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from grpo_eqx.tracking.plots.lines import DATA
from grpo_eqx.tracking.plots.style import INK, SERIES, SMALL_TEXT, dress, new_axes

_MOST_BARS = 80
_LABELS_WIDTH = 130.0
_ROOM = 1.35
"""Height of the plot over the height of most bars; the few steps that compile may be cut off."""


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """Seconds of each step, by phase."""

    steps: Float[np.ndarray, " N"]
    phases: Mapping[str, Float[np.ndarray, " N"]]
    """Seconds of each phase, which add up to the seconds of the step."""
    compiling: Float[np.ndarray, " N"]
    """Seconds that compilation took, within the phases or beside them."""

    @property
    def total(self) -> Float[np.ndarray, " N"]:
        return np.sum(list(self.phases.values()), axis=0)

    def binned(self) -> "StepTimes":
        """Returns means over as many stretches of steps as the plot has room for."""
        count = min(len(self.steps), _MOST_BARS)

        def means(values: np.ndarray) -> np.ndarray:
            return np.array([part.mean() for part in np.array_split(values, count)])

        phases = {name: means(values) for name, values in self.phases.items()}
        return StepTimes(means(self.steps), phases, means(self.compiling))


def draw_step_times(times: StepTimes) -> Figure:
    """Draws the phases of steps, stacked, and hatched, the part that was compilation."""
    binned = times.binned()
    axes = new_axes(right=_LABELS_WIDTH)
    below, edges = np.zeros(len(binned.steps)), _edges(binned.steps)
    colors = itertools.cycle(SERIES)
    for (phase, seconds), color in zip(binned.phases.items(), colors, strict=False):
        _fill(axes, edges, below, below + seconds, f"{DATA}-{phase}", facecolor=color)
        below = below + seconds
    compiling = np.minimum(binned.compiling, below)
    if compiling.any():
        # From 0, whichever phases compiled, because the top of a bar may be cut off.
        _fill(
            axes, edges, np.zeros(len(below)), compiling, f"{DATA}-compiling",
            facecolor="none", edgecolor=INK, hatch="////",
        )  # fmt: skip
    dress(axes, f"seconds per step{_limit(axes, below, compiling)}")
    axes.set_xlim(edges[0], edges[-1])
    _label(axes, list(binned.phases), [float(np.median(x)) for x in times.phases.values()])
    assert isinstance(axes.figure, Figure)
    return axes.figure


def _edges(steps: Float[np.ndarray, " N"]) -> Float[np.ndarray, " N+1"]:
    """Returns where each bar begins and ends."""
    if len(steps) == 1:
        return np.array([steps[0] - 0.5, steps[0] + 0.5])
    middles = (steps[:-1] + steps[1:]) / 2
    first, last = 2 * steps[0] - middles[0], 2 * steps[-1] - middles[-1]
    return np.concatenate([[first], middles, [last]])


def _fill(
    axes: Axes, edges: np.ndarray, low: np.ndarray, high: np.ndarray, gid: str, **style: str
) -> None:
    steps = np.repeat(edges, 2)[1:-1]
    lower, upper = np.repeat(low, 2), np.repeat(high, 2)
    axes.fill_between(steps, lower, upper, where=upper > lower, lw=0, gid=gid, **style)  # type: ignore[arg-type]


def _limit(axes: Axes, total: np.ndarray, compiling: np.ndarray) -> str:
    """Limits the axis to the height of most steps; returns a note on the bars that it cuts off."""
    usual = total[compiling == 0] if (compiling == 0).any() else total
    top = _ROOM * float(np.percentile(usual, 95))
    axes.set_ylim(0, max(top, 1e-9))
    longer = int((total > top).sum())
    if not longer:
        return ""
    which = "1 bar is cut off, at" if longer == 1 else f"{longer} bars are cut off, at up to"
    return f"; {which} {total.max():.3g} s"


def _label(axes: Axes, phases: Sequence[str], medians: Sequence[float]) -> None:
    """Names the phases beside the last bar, at their heights, but without overlap."""
    low, high = axes.get_ylim()
    line = (high - low) * 0.09
    places = np.cumsum(medians) - np.array(medians) / 2
    for i in range(1, len(places)):
        places[i] = max(places[i], places[i - 1] + line)
    places -= max(0.0, places[-1] - high)
    colors = itertools.cycle(SERIES)
    for phase, median, place, color in zip(phases, medians, places, colors, strict=False):
        axes.annotate(
            "", (1.015, place), xytext=(1.045, place), xycoords=("axes fraction", "data"),
            textcoords=("axes fraction", "data"),
            arrowprops={"arrowstyle": "-", "color": color, "lw": 8, "shrinkA": 0,
                        "shrinkB": 0, "capstyle": "butt"},
            annotation_clip=False,
        )  # fmt: skip
        axes.annotate(
            f"{phase} {median:.2g} s", (1.06, place), xycoords=("axes fraction", "data"),
            va="center", fontsize=SMALL_TEXT, color=INK, annotation_clip=False,
        )  # fmt: skip
