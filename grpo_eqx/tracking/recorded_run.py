"""A run as its folder records it, for readers of runs that have ended or are going on."""

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_origin

from grpo_eqx.common.errors import FileError, UserError
from grpo_eqx.common.plain_data import field
from grpo_eqx.common.read_files import expanded, read_object
from grpo_eqx.settings.config import GRPOConfig
from grpo_eqx.settings.types import converted, union_parts
from grpo_eqx.tracking.metrics_file import Metrics
from grpo_eqx.tracking.run_folder import RunFolder, first_step

_MOST_NAMED = 3
_LAYOUT: Mapping[str, type] = {
    "hosts": int, "devices": int, "device_kind": str, "parameter_bytes": float,
    "optimizer_bytes": float, "reference_bytes": float,
}  # fmt: skip
"""Known fields of `layout.json`."""


@dataclasses.dataclass(frozen=True)
class RecordedRun:
    """Settings and metrics in a run folder, read without JAX and without the model."""

    folder: RunFolder
    settings: Mapping[str, Any]
    """The fields of `config.json`, and descriptions of objects passed in place of some of them."""
    steps: Sequence[Mapping[str, float]]
    """The metrics of each step, oldest first, with the step's number as `step`; NaN for values that
    were not finite."""
    evaluations: Sequence[Mapping[str, float]]
    """The metrics of each evaluation; `step` is the step after which it was made."""
    gaps: str | None = None
    """The lines of the metrics file that could not be read, and the steps that it lacks."""

    @classmethod
    def read(cls, path: str | Path) -> "RecordedRun":
        """Reads a run's folder; raises `UserError` if it is not one, or cannot be read."""
        folder = RunFolder(expanded(path))
        if not os.path.lexists(folder.metrics):
            raise _not_a_run(folder)
        try:
            return cls.of(folder, read_settings(folder) | read_passed(folder))
        except FileError as error:
            raise UserError(f"the run in {str(path)!r} cannot be read: {error}") from error

    @classmethod
    def of(cls, folder: RunFolder, settings: Mapping[str, Any]) -> "RecordedRun":
        """Reads the metrics of a folder whose settings are known."""
        metrics = Metrics.read(folder.metrics)
        gaps = metrics.gaps(folder.metrics.name, first=first_step(settings))
        return cls(folder, settings, metrics.steps, metrics.evaluations, gaps)

    @property
    def name(self) -> str:
        """Name to show: `run_name`, or else the name of the folder."""
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
        """The written tables of completions, by step, oldest first."""
        return self.folder.completion_tables()

    def values(self, name: str) -> list[float]:
        """Returns a metric of every step, NaN for steps without it."""
        return [step.get(name, math.nan) for step in self.steps]


def _not_a_run(folder: RunFolder) -> UserError:
    """Returns an error that says why a folder is not a run folder, and names run folders nearby."""
    path, name = folder.path, folder.metrics.name
    if not os.path.exists(path):
        return UserError(f"{str(path)!r} does not exist: name the output_dir of a run.")
    around = [path.resolve().parent / name, *sorted(path.glob(f"*/{name}"))]
    runs = [str(metrics.parent) for metrics in around if metrics.is_file()]
    known = ", ".join(map(repr, runs[:_MOST_NAMED])) + ", ..." * (len(runs) > _MOST_NAMED)
    advice = f"Runs nearby: {known}." if runs else "Name the output_dir of a run."
    return UserError(f"{str(path)!r} is not a run folder: it has no {name}. {advice}")


def read_settings(folder: RunFolder) -> dict[str, Any]:
    """Reads `config.json`; raises `FileError` for a value whose type is not its setting's.

    Unknown settings, from another version, are not checked, nor are texts of settings with choices.
    """
    found = read_object(folder.config, folder.config.name)
    for name in found.keys() & GRPOConfig.__dataclass_fields__.keys():
        parts = union_parts(GRPOConfig)[name]
        if isinstance(found[name], str) and any(
            part is str or get_origin(part) is Literal for part in parts
        ):
            continue
        try:
            converted(GRPOConfig, name, found[name])
        except UserError as error:
            raise FileError(f"{folder.config.name}: {error}") from error
    return found


def read_passed(folder: RunFolder) -> dict[str, str]:
    """Reads descriptions of objects passed to `GRPOTrainer` in place of settings, by setting."""
    found = read_object(folder.passed, folder.passed.name, optional=True)
    return {name: field(found, name, str, folder.passed.name) for name in found}


def read_layout(folder: RunFolder) -> dict[str, Any]:
    """Reads `layout.json`, the layout of a run on its devices."""
    return _typed(folder.layout, _LAYOUT)


def read_plan(folder: RunFolder) -> dict[str, Any]:
    """Reads `plan.json`, which `grpo-eqx plan --json` wrote."""
    return _typed(folder.plan, {"peak_bytes": float})


def _typed(path: Path, kinds: Mapping[str, type]) -> dict[str, Any]:
    """Reads a file without its null fields; raises `FileError` for a known field of wrong type."""
    found = read_object(path, path.name)
    for name in kinds.keys() & found.keys():
        if found[name] is not None:
            field(found, name, kinds[name], path.name)
    return {name: value for name, value in found.items() if value is not None}
