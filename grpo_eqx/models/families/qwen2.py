"""Qwen2 and Qwen2.5."""

import dataclasses
from contextlib import suppress
from typing import Any, ClassVar

from grpo_eqx.common.errors import UserError
from grpo_eqx.models.architecture import QKV, Architecture
from grpo_eqx.models.decoder import Decoder
from grpo_eqx.models.decoder_config import DecoderConfig, FileFormat, layer_kinds
from grpo_eqx.models.families.qwen_windows import read_windows, write_windows
from grpo_eqx.models.rotary import RopeScaling

_SIZES: dict[str, dict[str, Any]] = {
    "0.5B": dict(hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
                 num_attention_heads=14, num_key_value_heads=2),
    "1.5B": dict(hidden_size=1536, intermediate_size=8960, num_hidden_layers=28,
                 num_attention_heads=12, num_key_value_heads=2),
    "3B": dict(hidden_size=2048, intermediate_size=11008, num_hidden_layers=36,
               num_attention_heads=16, num_key_value_heads=2),
    "7B": dict(hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
               num_attention_heads=28, num_key_value_heads=4,
               vocab_size=152064, tie_word_embeddings=False),
    "14B": dict(hidden_size=5120, intermediate_size=13824, num_hidden_layers=48,
                num_attention_heads=40, num_key_value_heads=8,
                vocab_size=152064, tie_word_embeddings=False),
    "32B": dict(hidden_size=5120, intermediate_size=27648, num_hidden_layers=64,
                num_attention_heads=40, num_key_value_heads=8,
                vocab_size=152064, tie_word_embeddings=False),
    "72B": dict(hidden_size=8192, intermediate_size=29568, num_hidden_layers=80,
                num_attention_heads=64, num_key_value_heads=8,
                vocab_size=152064, tie_word_embeddings=False),
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen2Config(DecoderConfig):
    """Sizes and constants of a Qwen2 model; fields as in Hugging Face's `Qwen2Config`."""

    file_format: ClassVar[FileFormat] = FileFormat(
        model_type="qwen2",
        architecture="Qwen2ForCausalLM",
        absent={"tie_word_embeddings": False},
        constant={"hidden_act": "silu"},
        unwritten={"attention_bias": True},
        read=read_windows,
        write=write_windows,
    )
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int = 151936
    head_dim: int | None = None
    max_position_embeddings: int = 32768
    rope_theta: float = 1_000_000.0
    rope_scaling: RopeScaling | None = None
    sliding_window: int | None = None
    layer_types: tuple[str, ...] | None = None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True

    @property
    def architecture(self) -> Architecture:
        return Architecture(layers=layer_kinds(self), biased=QKV)

    @classmethod
    def from_name(cls, name: str) -> "Qwen2Config":
        """Returns the architecture of a Qwen2.5 model by its name, without network access.

        `name` is a size ("3B") or a hub name ("Qwen/Qwen2.5-3B-Instruct"). The constants are
        those of the Instruct models' `config.json`. Raises `UserError` for an unknown name.
        """
        size = name.rsplit("/", 1)[-1].removeprefix("Qwen2.5-").removesuffix("-Instruct")
        if size not in _SIZES:
            raise UserError(f"no Qwen2.5 size named {name!r}; known sizes: {', '.join(_SIZES)}.")
        return cls(**_SIZES[size])

    @classmethod
    def published(cls, name: str) -> "Qwen2Config | None":
        if not name.startswith("Qwen/"):
            return None
        with suppress(UserError):  # an unknown name
            return cls.from_name(name)
        return None


Qwen2 = Decoder
"""Module of a Qwen2 model."""
