"""Settings of runs that are not at their defaults."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_eqx.common.errors import UserError
from grpo_eqx.settings.config import GRPOConfig
from grpo_eqx.settings.hints import HINTS
from grpo_eqx.settings.types import all_converted
from grpo_eqx.tracking.run_folder import PASSED

OF_SEEDS = frozenset({"seed", "output_dir", "run_name"})
"""Settings in which runs of one group may differ."""
_NAMES_OF_RUNS = frozenset({"output_dir", "run_name"})
UNKNOWN = "-"
"""Text for an unknown value, such as the default of a setting of another version."""
UNUSED = "unused"
"""Text for a setting that is `None` because others of the run leave it without meaning."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """Setting that at least one run, or group of runs, changed."""

    name: str
    values: Sequence[str]
    """The value in each run, as text."""
    default: str
    """The value if the setting had been left out, as text."""

    @property
    def differs(self) -> bool:
        """Whether the runs have different values."""
        return len(set(self.values)) > 1


def special_settings(configs: Sequence[Mapping[str, Any]]) -> list[Setting]:
    """Returns the settings that some run changed from its default, in the config's order.

    Leaves out the name and the folder of a run, and settings that differ only because another
    setting changes their default.

    **Arguments:**

    - `configs`: fields of the `config.json` of each run.
    """
    changes = [changed_settings(config) for config in configs]
    names = dict.fromkeys(name for config in configs for name in config)
    found = []
    for name in names:
        default = next((change[name] for change in changes if name in change), None)
        if default is not None and name not in _NAMES_OF_RUNS:
            values = [
                _value(config, name, is_default=name not in change, default=default)
                for config, change in zip(configs, changes, strict=True)
            ]
            found.append(Setting(name, values, default))
    return found


def _value(config: Mapping[str, Any], name: str, *, is_default: bool, default: str) -> str:
    """Returns a run's value as text, beside a default of another run that has changed it."""
    if name not in config:
        return UNKNOWN
    if is_default and config[name] is None and default != shown(None):
        return UNUSED
    return shown(config[name])


def changed_settings(settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns the changed settings of a run, each with its default as text.

    The default of a setting is its value if it had been left out, such as k3 for `kl_estimator`
    when `beta` is set. Settings of a subclass of `GRPOConfig`, or of another version, have no known
    default.
    """
    fields = {x.name: x.default for x in dataclasses.fields(GRPOConfig)}
    known = {
        name: value
        for name, value in settings.items()
        if name in fields and not str(value).endswith(PASSED)
    }
    try:
        cfg = GRPOConfig(**all_converted(GRPOConfig, known, HINTS))
    except UserError:  # settings of another version
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
    except UserError:  # other settings require this one
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
