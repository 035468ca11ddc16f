"""Settings of runs that say what is special about them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_eqx.config import GRPOConfig
from grpo_eqx.errors import UserError

OF_SEEDS = frozenset({"seed", "output_dir", "run_name"})
"""Settings in which runs may differ that are seeds of one another."""
_NAMES_OF_RUNS = frozenset({"output_dir", "run_name"})
UNKNOWN = "-"
"""What is shown for the default of a setting that `GRPOConfig` does not have."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """Setting that one of several runs, or groups of runs, changed, or in which they differ."""

    name: str
    values: Sequence[str]
    """Its value in each, as text."""
    default: str
    """The value that it would have had if the first had not set it, as text."""

    @property
    def differs(self) -> bool:
        """Whether the runs differ in it."""
        return len(set(self.values)) > 1


def special_settings(configs: Sequence[Mapping[str, Any]]) -> list[Setting]:
    """Returns the settings that are not at their defaults, or not the same, in the config's order.

    **Arguments:** the fields of each `config.json`. The name of a run and its folder are left out.
    """
    of_each = [default_settings(config) for config in configs]
    names = list(dict.fromkeys(name for config in configs for name in config))
    found = []
    for name in names:
        changed = any(
            name in config and config[name] != defaults.get(name)
            for config, defaults in zip(configs, of_each, strict=True)
        )
        values = [shown(config[name]) if name in config else UNKNOWN for config in configs]
        if name not in _NAMES_OF_RUNS and (changed or len(set(values)) > 1):
            default = next((x[name] for x in of_each if name in x), UNKNOWN)
            found.append(Setting(name, values, shown(default)))
    return found


def default_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the value that each setting of a run would have had if it had been left out.

    Such as `kl_estimator`, which is k3 where `beta` is set. Settings of a subclass of `GRPOConfig`,
    or of another version, have none.
    """
    fields = {x.name: x.default for x in dataclasses.fields(GRPOConfig)}
    known = {name: value for name, value in settings.items() if name in fields}
    try:
        cfg = GRPOConfig(**known)
    except UserError:  # of another version
        return {name: _as_json(fields[name]) for name in known}
    return {name: _as_json(_default(cfg, name, fields[name])) for name in known}


def _default(cfg: GRPOConfig, name: str, plain: Any) -> Any:
    if plain is not None:
        return plain
    try:
        return getattr(dataclasses.replace(cfg, **{name: None}).resolved(), name)
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
