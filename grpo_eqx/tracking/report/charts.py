"""Plots of a report, by section."""

import dataclasses
import io
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from grpo_eqx.tracking.metric_registry import find_metric
from grpo_eqx.tracking.plots.lines import Intervals, Line, Scale, draw_lines
from grpo_eqx.tracking.plots.series import Band, Course
from grpo_eqx.tracking.plots.stack import StepTimes, draw_step_times
from grpo_eqx.tracking.plots.svg import inline_svg
from grpo_eqx.tracking.report.reading import Group, ReportedRun
from grpo_eqx.tracking.safe_console import literal

_PNG_DPI = 144
_TIMES, _TOTALS = "time/train/", ("step_s", "step_avg")
"""Prefix of the metrics of a step's phases, and beginnings of the rest of a name for totals."""
_MEMORY = "memory/train/"
_ENDS = ("/ci_low", "/ci_high")
"""Suffixes of the metrics that are the ends of a figure's interval."""


@dataclasses.dataclass(frozen=True)
class Plot:
    """Plot of a report."""

    name: str
    """Name of its picture's file, and prefix of its ids on the page."""
    title: str
    about: str
    """Caption: what the plot shows, in a sentence with figures."""
    svg: str
    png: bytes


@dataclasses.dataclass(frozen=True)
class _Chart:
    """Metric that is plotted."""

    metric: str
    title: str
    about: str
    scale: Scale
    file: str
    """Name of its picture."""

    @classmethod
    def of(
        cls, metric: str, title: str, *, from_zero: bool = False, logarithmic: bool = False
    ) -> "_Chart":
        """Returns the chart of a metric, with its unit and meaning from the registry."""
        entry = find_metric(metric)
        unit, about = ("", "") if entry is None else (entry.unit, entry.meaning)
        scale = Scale(
            unit=unit or title.lower(), share=unit == "share", from_zero=from_zero,
            logarithmic=logarithmic,
        )  # fmt: skip
        file = "".join(letter if letter.isalnum() else "_" for letter in metric)
        return cls(metric, title, about.replace("`", ""), scale, file)  # the page has no Markdown


_LENGTH = (
    _Chart.of("completions/mean_length", "Completion length", from_zero=True),
    _Chart.of("completions/clipped_ratio", "Truncated completions", from_zero=True),
)
_TOOLS = (
    _Chart.of("tools/turns", "Turns", from_zero=True),
    _Chart.of("tools/call_frequency", "Calls", from_zero=True),
    _Chart.of("tools/failure_frequency", "Calls that failed", from_zero=True),
    _Chart.of("time/tools/call_s", "Time of a call", from_zero=True),
    _Chart.of("time/tools/wait_s", "Time without decoding", from_zero=True),
    _Chart.of("agents/requests", "Requests", from_zero=True),
    _Chart.of("agents/forks", "Forks", from_zero=True),
    _Chart.of("time/agents/run_s", "Time of an agent", from_zero=True),
)
_POLICY = (
    _Chart.of("entropy", "Entropy", from_zero=True),
    _Chart.of("kl", "KL to the reference", from_zero=True),
    _Chart.of("clip_ratio/region_mean", "Clipped ratios", from_zero=True),
    _Chart.of(
        "sampling/sampling_logp_difference/mean", "Gap between sampler and trainer",
        logarithmic=True,
    ),
    _Chart.of("grad_norm", "Gradient norm", from_zero=True),
    _Chart.of("loss", "Loss"),
)  # fmt: skip


def draw_sections(groups: Sequence[Group]) -> dict[str, list[Plot]]:
    """Draws all plots whose metrics the runs have. Call it within `plotting`."""
    return {
        "learning": [*_rewards(groups), *_evaluations(groups), *_of_callbacks(groups)],
        "length": [plot for chart in _LENGTH for plot in _plot(chart, groups)],
        "tools": [plot for chart in _TOOLS for plot in _plot(chart, groups)],
        "policy": [plot for chart in _POLICY for plot in _plot(chart, groups)],
        "time": list(_times(groups)),
        "memory": list(_memory(groups)),
    }


def _rewards(groups: Sequence[Group]) -> Iterator[Plot]:
    yield from _plot(_Chart.of("reward", "Reward"), groups)
    names = [name for name in _names(groups) if name.startswith("rewards/")]
    means = [name for name in names if name.endswith("/mean")]
    for name in means if len(means) > 1 else ():
        func = name.removeprefix("rewards/").removesuffix("/mean")
        yield from _plot(_Chart.of(name, f"Reward: {func}"), groups)
    flat = _Chart.of("frac_reward_zero_std", "Groups without variance", from_zero=True)
    yield from _plot(flat, groups)


def _names(groups: Sequence[Group]) -> list[str]:
    """Returns the names of all metrics of the runs."""
    return sorted({name for group in groups for run in group.runs for name in run.metric_names()})


def _last_step(groups: Sequence[Group]) -> float:
    return float(max(run.last_step for group in groups for run in group.runs))


def _line(group: Group, name: str) -> Line | None:
    """Returns the line of a metric of steps, unless the runs lack it."""
    courses = [run.course(name) for run in group.runs]
    courses = [course for course in courses if not course.is_empty]
    if not courses:
        return None
    return Line(group.name, group.index, courses[0] if len(courses) == 1 else Band.of(courses))


def _plot(
    chart: _Chart,
    groups: Sequence[Group],
    line_of: Callable[[Group, str], Line | None] = _line,
    levels: Mapping[str, float] | None = None,
) -> Iterator[Plot]:
    """Draws a metric, unless no run has it."""
    lines = [line for group in groups if (line := line_of(group, chart.metric)) is not None]
    if lines:
        yield _drawn(chart, lines, draw_lines(lines, chart.scale, _last_step(groups), levels))


def _evaluations(groups: Sequence[Group]) -> Iterator[Plot]:
    for name in _names(groups):
        if not name.startswith("eval/") or name.endswith((*_ENDS, "eval/num_problems")):
            continue
        figure = name.removeprefix("eval/")
        title = f"Held out: {figure.replace('/', ' ').replace('_', ' ')}"
        yield from _plot(_Chart.of(name, title), groups, _evaluation)


def _evaluation(group: Group, name: str) -> Line | None:
    """Returns the line of a metric of evaluations, unless the runs lack it."""
    found = [(run, run.evaluations(name)) for run in group.runs]
    found = [(run, course) for run, course in found if not course.is_empty]
    if not found:
        return None
    if len(found) > 1:
        seeds = Band.of_points([course for _, course in found])
        return Line(group.name, group.index, seeds, points=True)
    (run, course) = found[0]
    ends = [Course(course.steps, run.evaluations(f"{name}{end}").at(course.steps)) for end in _ENDS]
    intervals = None if any(each.is_empty for each in ends) else Intervals(*ends)
    return Line(group.name, group.index, course, intervals, points=True)


def _of_callbacks(groups: Sequence[Group]) -> Iterator[Plot]:
    """Draws metrics that callbacks have added to steps or evaluations."""
    taken = {_Chart.of(name, "").file for name in _names(groups) if find_metric(name) is not None}
    for name in _names(groups):
        if find_metric(name) is None and not name.startswith("eval/"):
            shown = literal(name, newlines=False).plain
            for title, line_of in ((shown, _line), (f"{shown}, evaluations", _evaluation)):
                chart = _Chart.of(name, title)
                file = _unused(chart.file, taken)
                chart = dataclasses.replace(
                    chart, about="Logged by a callback or a reward function.", file=file
                )
                for drawn in _plot(chart, groups, line_of):
                    taken.add(file)
                    yield drawn


def _unused(file: str, taken: Collection[str]) -> str:
    """Returns the name of a file, with a number if another metric's file has this name."""
    others = (f"{file}_{number}" for number in itertools.count(2))
    return next(x for x in itertools.chain([file], others) if x not in taken)


def _times(groups: Sequence[Group]) -> Iterator[Plot]:
    for group in groups:
        run = group.runs[0]
        times = step_times(run)
        if times is None:
            continue
        alone = len(groups) == 1
        compiled = float(times.compiling.sum())
        about = (
            f"{float(np.median(times.total)):.3g} s per step (median), {times.total.sum():,.0f} s "
            f"in all; hatched: compilation, which took {compiled:,.3g} s, some of it beside steps."
        )
        if len(group.runs) > 1:
            about = f"Of {run.name}: {about}"
        title = "Step time" if alone else f"Step time: {group.name}"
        yield _finished(
            "step_time" if alone else f"step_time_{group.index + 1}",
            title, about, about, draw_step_times(times),
        )  # fmt: skip


def step_times(run: ReportedRun) -> StepTimes | None:
    """Returns the seconds of a run's steps by phase; `None` if they were not recorded."""
    names = [
        name
        for name in run.metric_names()
        if name.startswith(_TIMES)
        and not name.removeprefix(_TIMES).startswith(_TOTALS)
        and find_metric(name) is not None  # a callback's time may be part of a phase
    ]
    total = run.course("step_time")
    if total.is_empty or not names:
        return None
    phases = {
        name.removeprefix(_TIMES).removesuffix("_s").replace("_", " "): np.nan_to_num(
            run.course(name).values
        )
        for name in names
    }
    # Phases in the order of a step, then others.
    order = ["rollout", "reward", "update"]
    known = {name: phases.pop(name) for name in order if name in phases}
    compiling = np.nan_to_num(run.course("compile/seconds").values)
    return StepTimes(total.steps, {**known, **phases}, compiling)


def _memory(groups: Sequence[Group]) -> Iterator[Plot]:
    names = [
        name
        for name in _names(groups)
        if name.startswith(_MEMORY) and find_metric(name) is not None
    ]
    for name in names:
        short = name.removeprefix(_MEMORY).removesuffix("_gib").replace("_", " ")
        chart = _Chart.of(name, f"Memory: {short}", from_zero=True)
        levels = {} if "host" in name else planned_levels(groups)
        yield from _plot(chart, groups, _of_first_run, levels)


def _of_first_run(group: Group, name: str) -> Line | None:
    course = group.runs[0].course(name)
    return None if course.is_empty else Line(group.name, group.index, course)


def planned_levels(groups: Sequence[Group]) -> dict[str, float]:
    """Returns the planned peak in GiB, if all runs have the same."""
    peaks = {run.plan.get("peak_bytes") for group in groups for run in group.runs}
    (peak,) = peaks if len(peaks) == 1 else (None,)
    return {} if peak is None else {f"planned peak {peak / 2**30:.3g}": peak / 2**30}


def _drawn(chart: _Chart, lines: Sequence[Line], figure: Figure) -> Plot:
    described = " ".join(f"{x.label}: {_course_in_words(x, chart.scale)}" for x in lines)
    words = f" {_course_in_words(lines[0], chart.scale)}" if len(lines) == 1 else ""
    about = chart.about + words
    return _finished(chart.file, chart.title, about, f"{chart.about} {described}", figure)


def _finished(name: str, title: str, about: str, description: str, figure: Figure) -> Plot:
    """Returns a figure as a plot: a picture, and an SVG for the page, where the title is text."""
    file = io.BytesIO()
    text = figure.suptitle(title, x=0.01, ha="left", weight="bold")
    figure.savefig(file, format="png", dpi=_PNG_DPI, facecolor="white")
    text.set_visible(False)
    return Plot(name, title, about, inline_svg(figure, name, title, description), file.getvalue())


def _course_in_words(line: Line, scale: Scale) -> str:
    """Describes a line by its first and last values."""
    seeds = isinstance(line.course, Band)
    course = line.course.mean if isinstance(line.course, Band) else line.course
    finite = np.isfinite(course.values)
    steps, values = course.steps[finite], course.values[finite]
    if len(values) == 1:
        return f"{number(values[0], scale)} after step {steps[0]:,.0f}."
    if values.min() == values.max():
        return f"{number(values[0], scale)} throughout."
    if line.points or seeds:
        return (
            f"{number(values[0], scale)} after step {steps[0]:,.0f}, {number(values[-1], scale)} "
            f"after step {steps[-1]:,.0f}."
        )
    first, last, count = course.ends()
    over = "the first and last step" if count == 1 else f"the first and last {count} steps"
    return (
        f"{number(first, scale)} to {number(last, scale)} (means of {over}); lowest "
        f"{number(values.min(), scale)}, highest {number(values.max(), scale)}."
    )


def number(value: float, scale: Scale) -> str:
    """Returns a value as people read it."""
    return f"{value:.1%}" if scale.share else f"{value:.3g}"
