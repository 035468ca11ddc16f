"""The model families that can be loaded, by Hugging Face's `model_type`."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jaxtyping import PRNGKeyArray

from grpo_eqx.common.errors import UserError
from grpo_eqx.common.plain_data import brief
from grpo_eqx.models.config import ModelConfig
from grpo_eqx.models.config_fields import read_fields
from grpo_eqx.models.decoder import Decoder
from grpo_eqx.models.decoder_config import DecoderConfig
from grpo_eqx.models.families.gemma2 import Gemma2Config
from grpo_eqx.models.families.gemma3 import Gemma3Config
from grpo_eqx.models.families.llama import LlamaConfig
from grpo_eqx.models.families.mistral import MistralConfig
from grpo_eqx.models.families.qwen2 import Qwen2Config
from grpo_eqx.models.families.qwen3 import Qwen3Config
from grpo_eqx.models.families.qwen3_moe import Qwen3MoeConfig
from grpo_eqx.models.interface import CausalLM


class Family(NamedTuple):
    """Config and module classes of a model family."""

    config: type[ModelConfig]
    model: type[CausalLM]


_DECODERS: Sequence[type[DecoderConfig]] = (
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    LlamaConfig,
    MistralConfig,
    Gemma2Config,
    Gemma3Config,
)
FAMILIES: dict[str, Family] = {}
"""The families by `model_type`."""


def register(model_type: str, config: type[ModelConfig], model: type[CausalLM] = Decoder) -> None:
    """Adds a family: models whose `config.json` has this `model_type` then load and train.

    **Arguments:**

    - `model_type`: the `model_type` of the files.
    - `config`: the config class.
    - `model`: the module; by default the decoder that the `architecture` of the config describes.

    Raises `UserError` for a type that is taken.
    """
    if model_type in FAMILIES:
        raise UserError(f"model_type {model_type!r} is registered already: choose another.")
    FAMILIES[model_type] = Family(config, model)


for _config in _DECODERS:
    register(_config.file_format.model_type, _config)


def read_config(path: str | Path) -> ModelConfig:
    """Reads a `config.json` of any family.

    Raises `UserError` for an unknown `model_type`, and for settings that its family refuses.
    """
    kind = read_fields(path).get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise UserError(
            f"{path}: model_type={brief(kind)} is not supported, only {', '.join(FAMILIES)}: use a "
            f"model of one of these."
        )
    return FAMILIES[kind].config.from_json(path)


def published_config(name: str) -> ModelConfig | None:
    """Returns the config of a published model by its hub name, without network access.

    It is the same at every revision (`name@revision`).
    """
    repository = name.partition("@")[0]
    known = (family.config.published(repository) for family in FAMILIES.values())
    return next((config for config in known if config is not None), None)


def init_model(config: ModelConfig, key: PRNGKeyArray) -> CausalLM:
    """Initializes a model of the config's family with random float32 weights."""
    family = next(each for each in FAMILIES.values() if each.config is type(config))
    return family.model.init(config, key)
