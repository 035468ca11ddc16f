"""The JSON files of a run's folder, in which known fields have the types that they are read as."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_origin

from grpo_eqx.common.errors import FileError, UserError
from grpo_eqx.common.plain_data import field
from grpo_eqx.common.read_files import read_object
from grpo_eqx.settings.config import GRPOConfig
from grpo_eqx.settings.types import converted, union_parts
from grpo_eqx.tracking.run_folder import RunFolder

_LAYOUT: Mapping[str, type] = {
    "hosts": int, "devices": int, "device_kind": str, "parameter_bytes": float,
    "optimizer_bytes": float, "reference_bytes": float,
}  # fmt: skip


def read_settings(folder: RunFolder) -> dict[str, Any]:
    """Reads `config.json`; raises `FileError` for a value of another type than its setting's.

    Settings of another version stay as they are, and so do texts where a setting has choices.
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
    """Reads what was passed to `GRPOTrainer` in place of settings, by their names."""
    found = read_object(folder.passed, folder.passed.name, optional=True)
    return {name: field(found, name, str, folder.passed.name) for name in found}


def read_layout(folder: RunFolder) -> dict[str, Any]:
    """Reads how a run is laid out on its devices."""
    return _typed(folder.layout, _LAYOUT)


def read_plan(folder: RunFolder) -> dict[str, Any]:
    """Reads the plan that `grpo-eqx plan` was asked to write."""
    return _typed(folder.plan, {"peak_bytes": float})


def _typed(path: Path, kinds: Mapping[str, type]) -> dict[str, Any]:
    """Reads an object; raises `FileError` for a known field of another type."""
    found = read_object(path, path.name)
    for name in kinds.keys() & found.keys():
        if found[name] is not None:
            field(found, name, kinds[name], path.name)
    return {name: value for name, value in found.items() if value is not None}
