"""How the time of `generate` and of `update` grows with sequences, their length, and devices.

    python benchmarks/scaling.py --json scaling.json --plot scaling.png

Growth is an exponent: 1 where twice as much takes twice as long. It is there between neighboring
points, where a few percent of noise already show, and for a series as its slope in logarithms. All
completions of a point have the same length. With it their work grows faster than linearly, because
attention's part is quadratic, so the growth of the time over the work is there too. Work is what
bounds a program: the bytes that decoding reads, weights and live keys and values, and the FLOPs of
an update's matrix products.

The devices are virtual ones of this machine's CPU, which share its cores, and the work is the same
on any number of them: the time should stay about level, and what grows is overhead. Everything else
runs on one of them. Each point is measured in a process of its own. Run it alone on the machine.
"""

import dataclasses
import itertools
import json
import math
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table
from scaling_worker import Work

from grpo_eqx import UserError

WORKER = Path(__file__).with_name("scaling_worker.py")
PROGRAMS = ("generate", "update")
PANELS = {
    "sequences": ("128 tokens each", "sequences"),
    "lengths": ("8 sequences", "completion length (tokens)"),
    "devices": ("32 sequences of 128 tokens", "virtual devices on the same cores"),
}
"""Each series' title and what it counts."""
STYLES: dict[str, dict[str, Any]] = {
    "generate": {"color": "#2b6cb0", "marker": "o", "linewidth": 2},
    "update": {"color": "#c05621", "marker": "s", "linewidth": 2},
    "linear growth": {"color": "gray", "linestyle": "--", "linewidth": 1},
    "growth of the work": {"color": "gray", "linestyle": ":", "linewidth": 1.5},
}
UNITS = {"generate": "B", "update": "FLOP"}
"""Of each program's work."""
GROUP, PROMPT_LENGTH = 4, 64
DEVICE_SEQUENCES = 32
SUPER_LINEAR = 1.15
"""Growth with a larger slope is reported: twice as much takes 2.2 times as long."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scaling:
    """What to measure."""

    sequences: tuple[int, ...] = (8, 16, 32, 64, 128)
    """Completions, of 128 tokens."""
    lengths: tuple[int, ...] = (64, 128, 256, 512, 1024)
    """Tokens of a completion, of which there are 8."""
    devices: tuple[int, ...] = (1, 2, 4, 8)
    """Virtual devices, for 32 completions of 128 tokens."""
    repeats: int = 3
    """Timed runs of each point."""
    json: Path | None = None
    """File for the figures."""
    plot: Path | None = None
    """File for the picture, a PNG."""

    def __post_init__(self) -> None:
        for name in PANELS:
            values = getattr(self, name)
            if len(values) < 2 or values[0] < 1 or list(values) != sorted(set(values)):
                raise UserError(f"{name} are {values}: give two or more, each above the last.")
        if any(n % GROUP for n in self.sequences):
            raise UserError(f"sequences are {self.sequences}: use multiples of {GROUP}, a group.")
        prompts = DEVICE_SEQUENCES // GROUP
        if any(prompts % n for n in self.devices):
            raise UserError(f"devices are {self.devices}: use divisors of {prompts}, the prompts.")
        if self.repeats < 1:
            raise UserError(f"repeats is {self.repeats}: it must be at least 1.")


@dataclasses.dataclass(frozen=True)
class Point:
    sequences: int
    length: int
    devices: int


def main(cfg: Scaling) -> None:
    series = {
        "sequences": {n: Point(n, 128, 1) for n in cfg.sequences},
        "lengths": {n: Point(8, n, 1) for n in cfg.lengths},
        "devices": {n: Point(DEVICE_SEQUENCES, 128, n) for n in cfg.devices},
    }
    every = dict.fromkeys(point for points in series.values() for point in points.values())
    measured = {point: measure(point, cfg.repeats) for point in track(list(every), "Measuring")}
    curves = [
        curve(name, program, points, measured)
        for name, points in series.items()
        for program in PROGRAMS
    ]
    show(curves)
    if cfg.json is not None:
        machine = f"{platform.machine()}, {os.cpu_count()} cores"
        cfg.json.write_text(json.dumps({"machine": machine, "curves": curves}, indent=2) + "\n")
    if cfg.plot is not None:
        plot(curves, cfg.plot)


def measure(point: Point, repeats: int) -> dict[str, Any]:
    """Seconds and work of each program, in a process with as many devices."""
    work = Work(point.sequences // GROUP, GROUP, PROMPT_LENGTH, point.length, repeats)
    flags = f"--xla_force_host_platform_device_count={point.devices}"
    flags = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
    done = subprocess.run(
        [sys.executable, str(WORKER), json.dumps(dataclasses.asdict(work))],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.stderr.write(done.stderr[-4000:])
        raise UserError(
            f"{point} failed with exit code {done.returncode}; what it said is above. "
            f"-9 mostly means that it took too much memory: use fewer or shorter completions."
        )
    return json.loads(done.stdout.splitlines()[-1])


def curve(
    series: str, program: str, points: Mapping[int, Point], measured: Mapping[Point, Any]
) -> dict[str, Any]:
    """A program's times along a series, and how they grow."""
    values = list(points)
    runs = [measured[point][program] for point in points.values()]
    seconds = [statistics.median(run["seconds"]) for run in runs]
    work = [run["work"] for run in runs]
    growth = slope(values, seconds)
    # Elsewhere linear growth, or none, is the yardstick.
    over_work = slope(work, seconds) if series == "lengths" else None
    return {
        "series": series,
        "program": program,
        "values": values,
        "seconds": seconds,
        "work": work,
        "tokens": [point.sequences * point.length for point in points.values()],
        "exponents": exponents(values, seconds),
        "slope": growth,
        "super_linear": growth > SUPER_LINEAR,
        "slope_over_work": over_work,
        "super_linear_over_work": over_work and over_work > SUPER_LINEAR,
    }


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Of the line through all points in logarithms, by least squares."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def exponents(x: Sequence[float], y: Sequence[float]) -> list[float]:
    """Slopes between neighboring points in logarithms."""
    logs = [(math.log(a), math.log(b)) for a, b in zip(x, y, strict=True)]
    return [(y1 - y0) / (x1 - x0) for (x0, y0), (x1, y1) in itertools.pairwise(logs)]


def show(curves: Sequence[dict[str, Any]]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 100, highlight=False)
    console.print(points_table(curves))
    console.print(growth_table(curves))


def points_table(curves: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="Time, also for each token of the completions and for each unit of work")
    for column in ("", "", "", "seconds", "exponent", "ms / token", "work / token", "time / work"):
        table.add_column(column, justify="right" if table.columns[1:] else "left")
    for each in curves:
        unit = UNITS[each["program"]]
        columns = (each[key] for key in ("values", "seconds", "work", "tokens"))
        growth = ["-", *(f"{x:.2f}" for x in each["exponents"])]
        for value, seconds, work, tokens, exponent in zip(*columns, growth, strict=True):
            first = value == each["values"][0]
            table.add_row(
                each["series"] if first else "",
                each["program"] if first else "",
                f"{value:,}",
                f"{seconds:.2f}",
                exponent,
                f"{1e3 * seconds / tokens:.2f}",
                f"{1e-6 * work / tokens:,.1f} M{unit}",
                f"{1e12 * seconds / work:.1f} ps / {unit}",
            )
        table.add_section()
    return table


def growth_table(curves: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="Growth")
    for column in (
        "",
        "",
        "between points",
        "slope",
        "super-linear",
        "over the work",
        "super-linear",
    ):
        table.add_column(column, justify="right" if table.columns[1:] else "left")

    def cells(growth: float | None, found: bool | None) -> tuple[str, str]:
        return ("-", "-") if growth is None else (f"{growth:.2f}", "yes" if found else "no")

    for each in curves:
        table.add_row(
            each["series"],
            each["program"],
            f"{min(each['exponents']):.2f} to {max(each['exponents']):.2f}",
            *cells(each["slope"], each["super_linear"]),
            *cells(each["slope_over_work"], each["super_linear_over_work"]),
        )
    return table


def plot(curves: Sequence[dict[str, Any]], path: Path) -> None:
    """Draws each series in a panel of its own, both axes logarithmic, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    figure = Figure(figsize=(12, 5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = dict(zip(PANELS, figure.subplots(1, len(PANELS), sharey=True), strict=True))
    for name, axes in panels.items():
        shown = [each for each in curves if each["series"] == name]
        for each in shown:
            draw(axes, each)
        title, label = PANELS[name]
        axes.set_title(title, loc="left", fontsize=11)
        axes.set_xlabel(label)
        axes.set(xscale="log", yscale="log")
        axes.set_xticks(shown[0]["values"], [f"{x:,}" for x in shown[0]["values"]])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    panels["sequences"].set_ylabel("time (s)")
    lines = [Line2D([], [], **style) for style in STYLES.values()]
    figure.legend(lines, STYLES, loc="outside upper center", ncols=len(lines), frameon=False)
    figure.savefig(path, dpi=150)


def draw(axes: Any, curve: dict[str, Any]) -> None:
    """A program's times, and what they would be if they grew linearly from the first."""
    color = STYLES[curve["program"]]["color"]
    values, seconds, work = (curve[key] for key in ("values", "seconds", "work"))

    def proportional(to: Sequence[float]) -> list[float]:
        return [seconds[0] * x / to[0] for x in to]

    axes.plot(values, seconds, **STYLES[curve["program"]])
    axes.plot(values, proportional(values), **{**STYLES["linear growth"], "color": color})
    if curve["series"] == "lengths":
        style = {**STYLES["growth of the work"], "color": color}
        axes.plot(values, proportional(work), **style)


if __name__ == "__main__":
    try:
        main(tyro.cli(Scaling, description=__doc__))
    except UserError as error:
        sys.exit(f"error: {error}")
