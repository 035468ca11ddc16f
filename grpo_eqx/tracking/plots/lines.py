"""Plot of lines over the steps of runs."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from grpo_eqx.tracking.plots.series import Band, Course
from grpo_eqx.tracking.plots.style import DASHES, MUTED, SERIES, SMALL_TEXT, dress, new_axes

_LONGEST_LABEL, _SHORT_LABEL = 36, 17
"""Most letters of a label, and of labels that stand side by side."""
_LEGEND_ROW = 21.0
DATA = "data"
"""Prefix of the ids of elements that show data, unlike axes and text."""


@dataclasses.dataclass(frozen=True)
class Intervals:
    """Ends of the confidence intervals of a course's values; NaN for values without interval."""

    low: Course
    high: Course


@dataclasses.dataclass(frozen=True)
class Line:
    """Line of a run, or of several seeds."""

    label: str
    color: int
    """Place among the lines, which determines color and dashes."""
    course: Course | Band
    """Values of a run, drawn pale with their running mean; or means of several runs, with a
    band."""
    intervals: Intervals | None = None
    points: bool = False
    """Whether to draw each value as a point, without a running mean, as for evaluations."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scale:
    """Unit and range of the vertical axis."""

    unit: str
    share: bool = False
    """Whether values are shares of 1, shown as percentages."""
    from_zero: bool = False
    logarithmic: bool = False
    """Whether to use a logarithmic scale, if all values are positive."""


def draw_lines(
    lines: Sequence[Line],
    scale: Scale,
    last_step: float,
    levels: Mapping[str, float] | None = None,
) -> Figure:
    """Draws lines, and levels to compare them with. Call it within `plotting`.

    **Arguments:**

    - `lines`: the lines.
    - `scale`: the vertical axis.
    - `last_step`: the last step of all runs, where the horizontal axis ends.
    - `levels`: levels by their labels.
    """
    columns = 2 if all(len(line.label) <= _SHORT_LABEL for line in lines) else 1
    rows = -(-len(lines) // columns) if len(lines) > 1 else 0
    axes = new_axes(below=_LEGEND_ROW * rows)
    for number, line in enumerate(lines):
        _draw(axes, line, f"{DATA}-{number}")
    for label, level in (levels or {}).items():
        drawn = axes.axhline(level, color=MUTED, lw=1.5, linestyle=(0, (4, 3)))
        drawn.set_gid(f"{DATA}-level")
        axes.annotate(
            label, (0, level), xycoords=("axes fraction", "data"), xytext=(2, 3),
            textcoords="offset points", color=MUTED, fontsize=SMALL_TEXT,
        )  # fmt: skip
    _scale(axes, scale, lines, (levels or {}).values())
    dress(axes, scale.unit, share=scale.share)
    end = max(last_step, 1)  # an evaluation before the first step is the only point
    axes.set_xlim(-0.02 * end, 1.02 * end)
    if len(lines) > 1:
        _legend(axes, lines, columns)
    assert isinstance(axes.figure, Figure)
    return axes.figure


def _draw(axes: Axes, line: Line, gid: str) -> None:
    color, dashes = SERIES[line.color % len(SERIES)], DASHES[line.color % len(DASHES)]
    strong: dict[str, Any] = {"color": color, "lw": 2.5, "linestyle": dashes, "gid": gid}
    if isinstance(line.course, Band):
        low, high, mean = line.course.low, line.course.high, line.course.mean
        if line.points:
            bars = axes.vlines(low.steps, low.values, high.values, color=color, lw=8, alpha=0.3)
            bars.set_gid(f"{gid}-band")
        else:
            axes.fill_between(
                low.steps, low.values, high.values, color=color, alpha=0.22, lw=0, gid=f"{gid}-band"
            )
        marker = "o" if line.points or len(mean.steps) == 1 else ""
        axes.plot(mean.steps, mean.values, marker=marker, ms=6, **strong)
    elif line.points:
        _draw_points(axes, line, line.course, strong)
    else:
        each, mean = line.course.thinned(), line.course.smooth().thinned()
        axes.plot(each.steps, each.values, color=color, alpha=0.45, lw=1, gid=f"{gid}-each")
        axes.plot(mean.steps, mean.values, marker="o" if len(mean.steps) == 1 else "", **strong)


def _draw_points(axes: Axes, line: Line, course: Course, strong: Mapping[str, Any]) -> None:
    axes.plot(course.steps, course.values, marker="o", ms=6, **strong)
    if line.intervals is not None:
        low, high = line.intervals.low.values, line.intervals.high.values
        bars = axes.vlines(course.steps, low, high, color=strong["color"], lw=1.5, alpha=0.7)
        bars.set_gid(f"{strong['gid']}-intervals")


def _scale(axes: Axes, scale: Scale, lines: Sequence[Line], levels: Any) -> None:
    """Sets the limits and the numbers of the vertical axis."""
    values = np.concatenate([*(_drawn(line) for line in lines), np.array(list(levels), float)])
    values = values[np.isfinite(values)]
    low, high = float(values.min()), float(values.max())
    if scale.logarithmic and low > 0 and high > 3 * low:
        axes.set_yscale("log")
        return
    if scale.from_zero and low >= 0:
        low = 0.0
    if high == low:
        around = 0.1 * abs(low) or 1.0
        low, high = low - (around if low else 0.0), high + around
    room = 0.06 * (high - low)
    top = high + (3 * room if levels else room)  # for the text above a level
    if scale.share:
        low, top = max(low, 0.0), min(top, 1.0 + room)
    axes.set_ylim(low - (0.4 * room if low == 0 else room), top)


def _drawn(line: Line) -> np.ndarray:
    """Returns all drawn values of a line."""
    if isinstance(line.course, Band):
        return np.concatenate([line.course.low.values, line.course.high.values])
    if line.intervals is None:
        return line.course.values
    ends = line.intervals.low.values, line.intervals.high.values
    return np.concatenate([line.course.values, *ends])


def _legend(axes: Axes, lines: Sequence[Line], columns: int) -> None:
    """Names the lines below the axes."""
    handles = [
        Line2D(
            [], [], color=SERIES[line.color % len(SERIES)], lw=2.5,
            linestyle=DASHES[line.color % len(DASHES)], label=shortened_label(line.label),
        )
        for line in lines
    ]  # fmt: skip
    axes.figure.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(0.0, 0.0), ncols=columns,
        borderaxespad=0, borderpad=0.1, labelspacing=0.3, handlelength=2.2, columnspacing=1.5,
    )  # fmt: skip


def shortened_label(label: str) -> str:
    """Returns a label; of a long label, the start and the end, in which runs differ."""
    half = _LONGEST_LABEL // 2
    return label if len(label) <= _LONGEST_LABEL else f"{label[:half]}…{label[-half:]}"
