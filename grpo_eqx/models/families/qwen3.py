"""Qwen3 without experts."""

import dataclasses
from typing import Any, ClassVar

from grpo_eqx.models.architecture import QKV, Architecture
from grpo_eqx.models.decoder_config import DecoderConfig, FileFormat, layer_kinds
from grpo_eqx.models.families.qwen_windows import read_windows, write_windows
from grpo_eqx.models.rotary import RopeScaling

_SIZES: dict[str, dict[str, Any]] = {
    "0.6B": dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
                 num_attention_heads=16),
    "1.7B": dict(hidden_size=2048, intermediate_size=6144, num_hidden_layers=28,
                 num_attention_heads=16),
    "4B": dict(hidden_size=2560, intermediate_size=9728, num_hidden_layers=36,
               num_attention_heads=32),
    "8B": dict(hidden_size=4096, intermediate_size=12288, num_hidden_layers=36,
               num_attention_heads=32, tie_word_embeddings=False),
    "14B": dict(hidden_size=5120, intermediate_size=17408, num_hidden_layers=40,
                num_attention_heads=40, tie_word_embeddings=False),
    "32B": dict(hidden_size=5120, intermediate_size=25600, num_hidden_layers=64,
                num_attention_heads=64, tie_word_embeddings=False),
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3Config(DecoderConfig):
    """Sizes and constants of a Qwen3 model; fields as in Hugging Face's `Qwen3Config`."""

    file_format: ClassVar[FileFormat] = FileFormat(
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        absent={"tie_word_embeddings": False},
        constant={"hidden_act": "silu"},
        read=read_windows,
        write=write_windows,
    )
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int = 151936
    head_dim: int | None = 128
    max_position_embeddings: int = 32768
    rope_theta: float = 1_000_000.0
    rope_scaling: RopeScaling | None = None
    sliding_window: int | None = None
    layer_types: tuple[str, ...] | None = None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    attention_bias: bool = False

    @property
    def architecture(self) -> Architecture:
        biased = QKV | {"o_proj"} if self.attention_bias else frozenset()
        return Architecture(layers=layer_kinds(self), biased=biased, head_norms=True)

    @classmethod
    def published(cls, name: str) -> "Qwen3Config | None":
        size = name.removeprefix("Qwen/Qwen3-")
        if size == name or size not in _SIZES:
            return None
        return cls(**_SIZES[size], num_key_value_heads=8, max_position_embeddings=40960)
