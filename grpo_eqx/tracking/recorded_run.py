"""A run as its folder records it, for all that reads runs after they ended or while they go on."""

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from grpo_eqx.common.errors import FileError, UserError
from grpo_eqx.common.read_files import expanded
from grpo_eqx.tracking.metrics_file import Metrics
from grpo_eqx.tracking.recorded_files import read_layout, read_passed, read_settings
from grpo_eqx.tracking.run_folder import RunFolder

_MOST_NAMED = 3


@dataclasses.dataclass(frozen=True)
class RecordedRun:
    """Settings and metrics that a run folder has, read without JAX and without the model."""

    folder: RunFolder
    settings: Mapping[str, Any]
    """The fields of `config.json`, and what was passed in place of some of them."""
    steps: Sequence[Mapping[str, float]]
    """The metrics of each step, oldest first, with its number as `step`; NaN where a value was not
    finite."""
    evaluations: Sequence[Mapping[str, float]]
    """The metrics of each evaluation, with the step after which it was made as `step`."""
    gaps: str | None = None
    """Which lines of the metrics file could not be read, and which steps it lacks."""

    @classmethod
    def read(cls, path: str | Path) -> "RecordedRun":
        """Reads the folder of a run. Raises `UserError` where it is not one, or cannot be read."""
        folder = RunFolder(expanded(path))
        if not os.path.lexists(folder.metrics):
            raise _not_a_run(folder)
        try:
            return cls.of(folder, read_settings(folder) | read_passed(folder))
        except FileError as error:
            raise UserError(f"the run in {str(path)!r} cannot be read: {error}") from error

    @classmethod
    def of(cls, folder: RunFolder, settings: Mapping[str, Any]) -> "RecordedRun":
        """Reads the metrics of a folder, whose settings are given."""
        metrics = Metrics.read(folder.metrics)
        first = None if settings.get("resume") not in ("auto", "never", None) else 1
        gaps = metrics.gaps(folder.metrics.name, first=first)
        return cls(folder, settings, metrics.steps, metrics.evaluations, gaps)

    @property
    def name(self) -> str:
        """Name to show: that of the settings, else of the folder."""
        return self.settings.get("run_name") or self.folder.path.resolve().name

    @cached_property
    def num_devices(self) -> int | None:
        """Number of devices, over all hosts; `None` where `layout.json` does not say."""
        try:
            found = read_layout(self.folder).get("devices", 0)
        except FileError:
            return None
        return found if found > 0 else None

    @cached_property
    def completion_tables(self) -> Mapping[int, Path]:
        """The tables of completions that were written, by step, oldest first."""
        return self.folder.completion_tables()

    def values(self, name: str) -> list[float]:
        """Returns a metric of every step, NaN where a step has none."""
        return [step.get(name, math.nan) for step in self.steps]


def _not_a_run(folder: RunFolder) -> UserError:
    """Says why a folder is not that of a run, and names those nearby that are."""
    path, name = folder.path, folder.metrics.name
    if not os.path.exists(path):
        return UserError(f"{str(path)!r} does not exist: name the output_dir of a run.")
    around = [path.resolve().parent / name, *sorted(path.glob(f"*/{name}"))]
    runs = [str(metrics.parent) for metrics in around if metrics.is_file()]
    known = ", ".join(map(repr, runs[:_MOST_NAMED])) + ", ..." * (len(runs) > _MOST_NAMED)
    advice = f"Runs nearby: {known}." if runs else "Name the output_dir of a run."
    return UserError(f"{str(path)!r} is not a run folder: it has no {name}. {advice}")
