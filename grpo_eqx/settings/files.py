"""Settings in YAML and JSON files."""

import dataclasses
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml

from grpo_eqx.common.clean_text import clean
from grpo_eqx.common.errors import UserError, refuse_all
from grpo_eqx.common.read_files import read_yaml
from grpo_eqx.settings.config import GRPOConfig
from grpo_eqx.settings.hints import HINTS
from grpo_eqx.settings.types import all_converted
from grpo_eqx.settings.unknown_names import refuse_sections, refuse_unknown


def read_settings(
    path: Path, others: Collection[str] = (), kind: type[GRPOConfig] = GRPOConfig
) -> dict[str, Any]:
    """Reads settings from a YAML or JSON file, such as the `config.json` of a run.

    **Arguments:**

    - `path`: the file; `-` for standard input.
    - `others`: names that the file may have besides settings.
    - `kind`: class of the config whose settings they are.

    Raises `UserError` for a file that cannot be read, for unknown settings and for values of other
    types. Whether the settings go together is not checked.
    """
    called = f"config {str(path)!r}"
    if os.path.isdir(path):
        raise UserError(f"{called} is a folder: give a file, such as the config.json of a run.")
    if path.suffix == ".toml":
        raise UserError(f"{called} is TOML, which is not read: write YAML or JSON.")
    settings = read_yaml(None if path == Path("-") else path, called)
    if settings is None:
        return {}
    if not isinstance(settings, dict):
        raise UserError(f"{called} has no settings by name, as in `steps: 100`.")
    try:
        names = kind.__dataclass_fields__.keys()
        known = {*names, *others}
        refuse_sections(settings, known)
        own = {name: value for name, value in settings.items() if name in names}
        refuse_all(
            lambda: refuse_unknown(settings, known),
            lambda: settings.update(all_converted(kind, own, HINTS)),
        )
        return settings
    except UserError as error:
        raise UserError(f"{called}: {error}") from error


def to_yaml(cfg: GRPOConfig) -> str:
    """Returns all settings as YAML, which `read_settings` reads."""
    settings = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in dataclasses.asdict(cfg).items()
    }
    text: str = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
    if clean(text) == text:
        return text
    escaped: str = yaml.safe_dump(settings, sort_keys=False)  # safe to print, and reads as the same
    return escaped
