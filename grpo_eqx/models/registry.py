"""The model families that can be loaded, by Hugging Face's `model_type`."""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from jaxtyping import PRNGKeyArray

from grpo_eqx.errors import UserError
from grpo_eqx.models.base import CausalLM, ModelConfig
from grpo_eqx.models.qwen2 import Qwen2
from grpo_eqx.models.qwen2_config import Qwen2Config


class Family(NamedTuple):
    """Config and module classes of a model family."""

    config: type[ModelConfig]
    model: type[CausalLM]


FAMILIES: Mapping[str, Family] = {"qwen2": Family(Qwen2Config, Qwen2)}


def read_config(path: str | Path) -> ModelConfig:
    """Reads a `config.json` of any family.

    Raises `UserError` for an unknown `model_type`, and for settings that its family refuses.
    """
    try:
        fields = json.loads(Path(path).read_text())
    except (OSError, ValueError):
        fields = None
    kind = fields.get("model_type") if isinstance(fields, dict) else None
    # Without a known type, the first family's reader says what is wrong with the file.
    family = FAMILIES.get(str(kind)) or next(iter(FAMILIES.values()))
    return family.config.from_json(path)


def published_config(name: str) -> ModelConfig | None:
    """Returns the config of a published model by its hub name, without network access.

    It is the same at every revision (`name@revision`).
    """
    repository = name.partition("@")[0]
    if repository.startswith("Qwen/"):
        with suppress(UserError):  # an unknown name
            return Qwen2Config.from_name(repository)
    return None


def init_model(config: ModelConfig, key: PRNGKeyArray) -> CausalLM:
    """Initializes a model of the config's family with random float32 weights."""
    family = next(each for each in FAMILIES.values() if each.config is type(config))
    return family.model.init(config, key)
