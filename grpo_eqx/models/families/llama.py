"""Llama 2 and 3, and models of their architecture: SmolLM2, DeepSeek-R1-Distill-Llama."""

import dataclasses
from typing import Any, ClassVar

from grpo_eqx.models.architecture import QKV, Architecture
from grpo_eqx.models.decoder_config import DecoderConfig, FileFormat, layer_kinds
from grpo_eqx.models.rotary import Llama3Scaling, RopeScaling


def _read(fields: dict[str, Any]) -> dict[str, Any]:
    """Gives every head of queries keys of its own, where the file does not say how many."""
    heads = fields.get("num_attention_heads")
    if fields.get("num_key_value_heads") is None and heads is not None:
        return {**fields, "num_key_value_heads": heads}
    return fields


_SIZES: dict[str, dict[str, Any]] = {
    "3.2-1B": dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,
                   num_attention_heads=32, tie_word_embeddings=True),
    "3.2-3B": dict(hidden_size=3072, intermediate_size=8192, num_hidden_layers=28,
                   num_attention_heads=24, tie_word_embeddings=True),
    "3.1-8B": dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
                   num_attention_heads=32),
    "3.1-70B": dict(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80,
                    num_attention_heads=64),
    "3.3-70B": dict(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80,
                    num_attention_heads=64),
}  # fmt: skip


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

    @classmethod
    def published(cls, name: str) -> "LlamaConfig | None":
        size = name.removeprefix("meta-llama/Llama-").removesuffix("-Instruct")
        if not name.startswith("meta-llama/") or size not in _SIZES:
            return None
        scaling = Llama3Scaling(
            factor=32.0 if size.startswith("3.2") else 8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        )
        return cls(
            **_SIZES[size],
            num_key_value_heads=8,
            vocab_size=128256,
            rms_norm_eps=1e-5,
            rope_scaling=scaling,
        )
