"""Settings of runs that say what is special about them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_eqx.common.errors import UserError
from grpo_eqx.settings.config import HINTS, GRPOConfig
from grpo_eqx.settings.types import all_converted
from grpo_eqx.tracking.run_folder import PASSED

OF_SEEDS = frozenset({"seed", "output_dir", "run_name"})
"""Settings in which runs may differ that are seeds of one another."""
_NAMES_OF_RUNS = frozenset({"output_dir", "run_name"})
UNKNOWN = "-"
"""Text for the default of a setting that `GRPOConfig` does not have, or for an unknown value."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """Setting that one of several runs, or groups of runs, changed."""

    name: str
    values: Sequence[str]
    """Its value in each, as text."""
    default: str
    """The value that it would have had if it had been left out, as text."""

    @property
    def differs(self) -> bool:
        """Whether the runs differ in it."""
        return len(set(self.values)) > 1


def special_settings(configs: Sequence[Mapping[str, Any]]) -> list[Setting]:
    """Returns the settings that are not at their defaults in all runs, in the config's order.

    **Arguments:** the fields of each `config.json`. The name of a run and its folder are left out,
    and so is what differs between runs because their defaults do: another setting says why.
    """
    changes = [changed_settings(config) for config in configs]
    names = dict.fromkeys(name for config in configs for name in config)
    found = []
    for name in names:
        default = next((change[name] for change in changes if name in change), None)
        if default is not None and name not in _NAMES_OF_RUNS:
            values = [shown(config[name]) if name in config else UNKNOWN for config in configs]
            found.append(Setting(name, values, default))
    return found


def changed_settings(settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns the settings of a run that are not at their defaults, with these, as text.

    A setting's default is the value that it would have had if it had been left out, such as k3 for
    `kl_estimator` where `beta` is set. Settings of a subclass of `GRPOConfig`, or of another
    version, have none.
    """
    fields = {x.name: x.default for x in dataclasses.fields(GRPOConfig)}
    known = {
        name: value
        for name, value in settings.items()
        if name in fields and not str(value).endswith(PASSED)
    }
    try:
        cfg = GRPOConfig(**all_converted(GRPOConfig, known, HINTS))
    except UserError:  # of another version
        cfg = None
    changed = {}
    for name, value in settings.items():
        if name not in fields:
            changed[name] = UNKNOWN
        elif value != _as_json(fields[name]):
            default = fields[name] if cfg is None else _default(cfg, name, fields[name])
            if value != _as_json(default):
                changed[name] = shown(_as_json(default))
    return changed


def _default(cfg: GRPOConfig, name: str, plain: Any) -> Any:
    if plain is not None:
        return plain
    try:
        unset: dict[str, Any] = {name: None}
        return getattr(dataclasses.replace(cfg, **unset).resolved(), name)
    except UserError:  # a setting that these others require
        return None


def _as_json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def shown(value: Any) -> str:
    """Returns a setting's value as text."""
    if isinstance(value, list):
        return ", ".join(map(shown, value)) or "none"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)
