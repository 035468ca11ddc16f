"""Llama 2 and 3, and models of their architecture: SmolLM2, DeepSeek-R1-Distill-Llama."""

import dataclasses
from typing import Any, ClassVar

from grpo_eqx.models.architecture import QKV, Architecture
from grpo_eqx.models.decoder_config import DecoderConfig, FileFormat, layer_kinds
from grpo_eqx.models.rotary import RopeScaling


def _read(fields: dict[str, Any]) -> dict[str, Any]:
    """By default, every head of queries has keys of its own."""
    heads = fields.get("num_attention_heads")
    if fields.get("num_key_value_heads") is None and heads is not None:
        return {**fields, "num_key_value_heads": heads}
    return fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    """Sizes and constants of a Llama model; fields as in Hugging Face's `LlamaConfig`."""

    file_format: ClassVar[FileFormat] = FileFormat(
        model_type="llama",
        architecture="LlamaForCausalLM",
        absent={"max_position_embeddings": 2048},
        constant={"hidden_act": "silu"},
        unwritten={"pretraining_tp": 1},
        read=_read,
    )
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int = 32000
    head_dim: int | None = None
    max_position_embeddings: int = 131072
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling | None = None
    sliding_window: int | None = None
    layer_types: tuple[str, ...] | None = None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False

    @property
    def architecture(self) -> Architecture:
        biased = QKV | {"o_proj"} if self.attention_bias else frozenset()
        return Architecture(layers=layer_kinds(self), biased=biased)
