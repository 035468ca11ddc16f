"""Mistral 7B and its successors."""

import dataclasses
from typing import Any, ClassVar

from grpo_eqx.models.architecture import Architecture
from grpo_eqx.models.config_fields import WINDOWED
from grpo_eqx.models.decoder_config import DecoderConfig, FileFormat, layer_kinds
from grpo_eqx.models.rotary import RopeScaling


def _read(fields: dict[str, Any]) -> dict[str, Any]:
    """Drops `layer_types`, which transformers ignores here: a window applies to every layer."""
    return {key: value for key, value in fields.items() if key != "layer_types"}


def _write(fields: dict[str, Any]) -> dict[str, Any]:
    return {"sliding_window": None, **fields}  # an absent one is not null


@dataclasses.dataclass(frozen=True, kw_only=True)
class MistralConfig(DecoderConfig):
    """Sizes and constants of a Mistral model; fields as in Hugging Face's `MistralConfig`."""

    file_format: ClassVar[FileFormat] = FileFormat(
        model_type="mistral",
        architecture="MistralForCausalLM",
        absent={"num_key_value_heads": 8, "sliding_window": 4096},
        constant={"hidden_act": "silu"},
        unwritten={"attention_bias": False},
        layer_types=lambda number: (WINDOWED,) * number,
        read=_read,
        write=_write,
    )
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int = 32000
    head_dim: int | None = None
    max_position_embeddings: int = 131072
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    sliding_window: int | None = None
    layer_types: tuple[str, ...] | None = None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False

    @property
    def architecture(self) -> Architecture:
        return Architecture(layers=layer_kinds(self))
