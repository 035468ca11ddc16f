"""Runs as a report shows them: all that can be read, and in groups that differ only in seeds."""

import collections
import dataclasses
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from grpo_eqx.common.errors import FileError
from grpo_eqx.common.read_files import expanded
from grpo_eqx.tracking.plots.series import Course
from grpo_eqx.tracking.recorded_run import (
    RecordedRun,
    read_layout,
    read_passed,
    read_plan,
    read_settings,
)
from grpo_eqx.tracking.report.ending import Ending, find_ending
from grpo_eqx.tracking.report.settings import OF_SEEDS
from grpo_eqx.tracking.run_folder import RunFolder
from grpo_eqx.tracking.safe_console import literal


@dataclasses.dataclass(frozen=True)
class ReportedRun:
    """Run of a report; parts of it may be missing."""

    run: RecordedRun
    layout: Mapping[str, Any]
    """The fields of `layout.json`; empty if it cannot be read."""
    plan: Mapping[str, Any]
    """The fields of `plan.json`, if there is one."""
    gaps: Sequence[str]
    """Sentences on parts that could not be read."""
    folder_shown: bool = False
    """Whether to show the parent folder in the name, because another run has the same name."""

    @property
    def name(self) -> str:
        folder = f"{self.run.folder.path.resolve().parent.name}/" if self.folder_shown else ""
        return literal(f"{folder}{self.run.name}", newlines=False).plain

    @property
    def settings(self) -> Mapping[str, Any]:
        return self.run.settings

    @property
    def last_step(self) -> int:
        """The last step that was recorded; 0 before the first."""
        return int(self.run.steps[-1]["step"]) if self.run.steps else 0

    @cached_property
    def ending(self) -> Ending:
        steps = self.settings.get("steps")
        return find_ending(
            self.run.folder, self.last_step, steps if isinstance(steps, int) else None
        )

    def course(self, name: str) -> Course:
        """Returns a metric over the steps."""
        return _course(self.run.steps, name)

    def evaluations(self, name: str) -> Course:
        """Returns a metric of the evaluations that have it."""
        return _course([row for row in self.run.evaluations if name in row], name)

    def metric_names(self) -> list[str]:
        """Returns the names of all metrics of steps and evaluations, sorted."""
        return sorted({name for row in (*self.run.steps, *self.run.evaluations) for name in row})


def _course(rows: Sequence[Mapping[str, float]], name: str) -> Course:
    return Course(
        np.array([row["step"] for row in rows], float),
        np.array([row.get(name, math.nan) for row in rows], float),
    ).one_per_step()


def read_runs(paths: Sequence[Path]) -> list[ReportedRun]:
    """Reads all that can be read of runs; runs of the same name show their parent folders.

    Raises `UserError` for a path that is not a run folder.
    """
    runs = [read_run(path) for path in paths]
    names = collections.Counter(run.name for run in runs)
    return [dataclasses.replace(run, folder_shown=names[run.name] > 1) for run in runs]


def read_run(path: Path) -> ReportedRun:
    """Reads all that can be read of a run's folder.

    Raises `UserError` for a path that is not a run folder.
    """
    folder, gaps = RunFolder(expanded(path)), list[str]()
    if not os.path.isfile(folder.metrics):
        RecordedRun.read(path)  # raises the error
    settings = _read(read_settings, folder, gaps, "its settings are not shown")
    passed = _read(read_passed, folder, gaps, "what was passed in place of settings is not shown")
    layout = _read(read_layout, folder, gaps, "its devices are not shown")
    plan: Mapping[str, Any] = {}
    if folder.plan.exists():
        plan = _read(read_plan, folder, gaps, "the plan is not shown")
    run = RecordedRun.of(folder, {**settings, **passed})
    if run.gaps is not None:
        gaps.append(f"{run.gaps}.")
    return ReportedRun(run, layout, plan, gaps)


def _read(
    read: Callable[[RunFolder], Mapping[str, Any]],
    folder: RunFolder,
    gaps: list[str],
    consequence: str,
) -> Mapping[str, Any]:
    """Reads a file of a folder; of an unreadable file, adds a sentence to `gaps`."""
    try:
        return read(folder)
    except FileError as error:
        gaps.append(f"{str(error).removesuffix('.')}: {consequence}.")
        return {}


@dataclasses.dataclass(frozen=True)
class Group:
    """Runs with the same settings but different seeds, drawn as one line."""

    runs: Sequence[ReportedRun]
    index: int
    """Place of the group among all groups, which determines its color."""

    @property
    def name(self) -> str:
        first = self.runs[0].name
        return first if len(self.runs) == 1 else f"{first} ({len(self.runs)} seeds)"

    @property
    def last_steps(self) -> list[int]:
        """The last steps of its runs, each once, in ascending order."""
        return sorted({run.last_step for run in self.runs})


def grouped(runs: Sequence[ReportedRun]) -> list[Group]:
    """Groups runs that differ only in their seeds, in the order of their first runs.

    Runs whose seeds are equal too, such as the same run on two machines, stay apart. So do runs
    whose settings cannot be read.
    """
    members: dict[str, list[ReportedRun]] = {}
    for place, run in enumerate(runs):
        others = {name: x for name, x in run.settings.items() if name not in OF_SEEDS}
        key = json.dumps(others, sort_keys=True, default=str) if others else f"unknown {place}"
        seeds = [other.settings.get("seed") for other in members.get(key, ())]
        if run.settings.get("seed") in seeds:
            key += f" again {place}"
        members.setdefault(key, []).append(run)
    return [Group(each, index) for index, each in enumerate(members.values())]
