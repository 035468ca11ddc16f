"""Settings in YAML and JSON files."""

import dataclasses
import json
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml

from grpo_eqx.config import HINTS, GRPOConfig
from grpo_eqx.errors import UserError, first_line, refuse_all, without_repetition
from grpo_eqx.peer_settings import refuse_sections, refuse_unknown
from grpo_eqx.setting_types import all_converted


def read_settings(
    path: Path, others: Collection[str] = (), kind: type[GRPOConfig] = GRPOConfig
) -> dict[str, Any]:
    """Reads settings from a YAML or JSON file, such as the `config.json` of a run.

    **Arguments:** the file, `-` for standard input; names that it may have besides settings; the
    config whose settings they are. Raises `UserError` for a file that cannot be read, for unknown
    settings and for values of other types. Whether the settings go together is not checked.
    """
    if path.is_dir():
        raise UserError(
            f"config {str(path)!r} is a folder: give a file, such as the config.json of a run."
        )
    if path.suffix == ".toml":
        raise UserError(f"config {str(path)!r} is TOML, which is not read: write YAML or JSON.")
    try:
        text = _read(path)
        if not text.strip():
            raise UserError("it is empty: write settings into it, as in `steps: 100`.")
        settings = _parse(text)
    except UserError as error:
        raise UserError(f"config {str(path)!r}: {first_line(error)}") from error
    except OSError as error:
        raise UserError(f"config {str(path)!r} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"config {str(path)!r} is not encoded in UTF-8: save it in UTF-8."
        ) from error
    except (yaml.YAMLError, json.JSONDecodeError) as error:
        raise UserError(f"config {str(path)!r} is no valid {_what_is_wrong(error)}.") from error
    if settings is None:
        return {}
    if not isinstance(settings, dict) or not all(isinstance(name, str) for name in settings):
        raise UserError(f"config {str(path)!r} has no settings by name, as in `steps: 100`.")
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
        raise UserError(f"config {str(path)!r}: {first_line(error)}") from error


def _read(path: Path) -> str:
    return sys.stdin.read() if path == Path("-") else path.read_text(encoding="utf-8")


def _parse(text: str) -> Any:
    """Parses JSON, or else YAML: of JSON, YAML lacks tabs and surrogate pairs."""
    try:
        return json.loads(text, object_pairs_hook=without_repetition)
    except UserError:
        raise
    except ValueError as error:
        try:
            return yaml.load(text, _Loader)
        except yaml.YAMLError as of_yaml:
            raise (error if text.lstrip().startswith("{") else of_yaml) from None


def _what_is_wrong(error: json.JSONDecodeError | yaml.YAMLError) -> str:
    """Names the format of a text that cannot be parsed, and where it is wrong."""
    if isinstance(error, json.JSONDecodeError):
        hint = "; JSON has no comments" if error.doc[error.pos :][:1] in "/#" else ""
        return f"JSON: line {error.lineno}, column {error.colno}: {error.msg}{hint}"
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return f"YAML: {' '.join(str(error).split())}"
    problem = getattr(error, "problem", None) or "it cannot be parsed"
    return f"YAML: line {mark.line + 1}, column {mark.column + 1}: {problem}"


class _Loader(yaml.SafeLoader):
    """YAML's safe loader, which would take the last of equal names."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    keys = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
    found: dict[Any, Any] = loader.construct_mapping(node, deep=True)
    without_repetition([(loader.construct_object(key, deep=True), None) for key in keys])
    return found


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def to_yaml(cfg: GRPOConfig) -> str:
    """Returns all settings as YAML, which `read_settings` reads."""
    settings = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in dataclasses.asdict(cfg).items()
    }
    text: str = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
    return text
