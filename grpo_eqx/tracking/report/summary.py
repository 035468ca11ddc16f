"""Figures that show at a glance how a run went."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from grpo_eqx.tracking.durations import readable_seconds
from grpo_eqx.tracking.plots.series import Course
from grpo_eqx.tracking.report.reading import ReportedRun

_GIB = 2**30
_OF_EVALUATIONS = "eval/"


@dataclasses.dataclass(frozen=True)
class Fact:
    """Figure of a run."""

    label: str
    value: str
    note: str = ""


def facts_of(run: ReportedRun) -> list[Fact]:
    """Returns the figures that a run has."""
    return [*_progress(run), *_learning(run), *_cost(run)]


def _progress(run: ReportedRun) -> Iterator[Fact]:
    steps = run.settings.get("steps")
    of_all = f"of {steps:,}" if isinstance(steps, int) else ""
    yield Fact("Steps", f"{run.last_step:,}", of_all)


def _learning(run: ReportedRun) -> Iterator[Fact]:
    reward = run.course("reward")
    if not reward.is_empty:
        first, last, count = reward.ends()
        steps = "step" if count == 1 else f"{count} steps"
        yield Fact("Reward", f"{last:.3g}", f"last {steps}; first {steps}: {first:.3g}")
    for name, course in _main_evaluations(run):
        last = float(course.values[-1])
        when = f"after step {course.steps[-1]:,.0f}"
        if len(course.steps) > 1:
            when += f"; {course.values[0]:.1%} after step {course.steps[0]:,.0f}"
        yield Fact(f"Held out, {name}", f"{last:.1%}", when + _interval(run, name))
    length = run.course("completions/mean_length")
    if not length.is_empty:
        cut = run.course("completions/clipped_ratio")
        note = "" if cut.is_empty else f"{cut.ends()[1]:.1%} truncated"
        yield Fact("Completion length", f"{length.ends()[1]:.3g} tokens", note)


def _main_evaluations(run: ReportedRun) -> list[tuple[str, Course]]:
    """Returns pass@1 for each way of sampling, by its name without `eval/`."""
    names = [
        name
        for name in run.metric_names()
        if name.startswith(_OF_EVALUATIONS) and name.endswith("/pass@1") and "strict" not in name
    ]
    courses = [(name.removeprefix(_OF_EVALUATIONS), run.evaluations(name)) for name in names]
    return [(name.replace("/", " "), course) for name, course in courses if not course.is_empty]


def _interval(run: ReportedRun, name: str) -> str:
    full = f"{_OF_EVALUATIONS}{name.replace(' ', '/')}"
    low, high = (run.evaluations(f"{full}/{end}") for end in ("ci_low", "ci_high"))
    if low.is_empty or high.is_empty:
        return ""
    return f"; interval {low.values[-1]:.1%} to {high.values[-1]:.1%}"


def _cost(run: ReportedRun) -> Iterator[Fact]:
    times = run.course("step_time")
    if not times.is_empty:
        compiled = float(np.nansum(run.course("compile/seconds").values))
        total = float(np.nansum(times.values))
        note = f"compiling took {readable_seconds(compiled)}, which may overlap" if compiled else ""
        yield Fact("Time of all steps", readable_seconds(total), note)
        yield Fact("Step time", f"{np.nanmedian(times.values):.3g} s", "median")
    layout = run.layout
    if "devices" in layout and "device_kind" in layout:
        hosts = layout.get("hosts", 1)
        where = "" if hosts == 1 else f"on {hosts} hosts"
        yield Fact("Devices", f"{layout['devices']} × {layout['device_kind']}", where)


def memory_facts(runs: Sequence[ReportedRun]) -> list[tuple[str, list[str]]]:
    """Returns the rows of a table of the runs' memory, in GiB or MiB."""
    rows: list[tuple[str, list[str]]] = []
    for label, field in (
        ("Parameters, per device", "parameter_bytes"),
        ("Optimizer state, per device", "optimizer_bytes"),
        ("Reference model, per device", "reference_bytes"),
    ):
        rows.append((label, [_size(run.layout.get(field)) for run in runs]))
    rows.append(("Planned peak, per device", [_size(run.plan.get("peak_bytes")) for run in runs]))
    for label, metric in (
        ("Measured peak, fullest device", "memory/train/peak_bytes_in_use_max_gib"),
        ("Measured peak, largest process", "memory/train/host_peak_gib"),
    ):
        rows.append((label, [_size(_largest(run.course(metric))) for run in runs]))
    return [(label, values) for label, values in rows if set(values) != {_UNKNOWN}]


_UNKNOWN = "not recorded"


def _largest(course: Course) -> float | None:
    return None if course.is_empty else float(np.nanmax(course.values)) * _GIB


def _size(size: int | float | None) -> str:
    if size is None:
        return _UNKNOWN
    return f"{size / _GIB:.2f} GiB" if size >= _GIB else f"{size / 2**20:.1f} MiB"
