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
    """The config and the module of a family of models."""

    config: type[ModelConfig]
    model: type[CausalLM]


FAMILIES: Mapping[str, Family] = {"qwen2": Family(Qwen2Config, Qwen2)}


def read_config(path: str | Path) -> ModelConfig:
    """Reads a `config.json` of any family.

    Raises `UserError` for a `model_type` that is not known, and for what a family refuses.
    """
    try:
        fields = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not a readable config.json: {error}.") from error
    kind = fields.get("model_type") if isinstance(fields, dict) else None
    # Without a known type the first family's reader says what is wrong with the file.
    family = FAMILIES.get(str(kind)) or next(iter(FAMILIES.values()))
    return family.config.from_json(path)


def published_config(name: str) -> ModelConfig | None:
    """Returns the config of a published model by its hub name, without any network."""
    if name.startswith("Qwen/"):
        with suppress(UserError):  # one that is not known by its name
            return Qwen2Config.from_name(name)
    return None


def init_model(config: ModelConfig, key: PRNGKeyArray) -> CausalLM:
    """Draws a model with random float32 weights, of the family that the config belongs to."""
    family = next(each for each in FAMILIES.values() if each.config is type(config))
    return family.model.init(config, key)
