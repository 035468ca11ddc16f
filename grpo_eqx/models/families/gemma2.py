"""Gemma 2 (arXiv 2408.00118)."""

import dataclasses
from typing import ClassVar

from grpo_eqx.models.architecture import Architecture
from grpo_eqx.models.config_fields import FULL, WINDOWED
from grpo_eqx.models.decoder_config import DecoderConfig, FileFormat, layer_kinds
from grpo_eqx.models.families.gemma import gemma_architecture, read_activation
from grpo_eqx.models.rotary import RopeScaling


def _alternating(number: int) -> tuple[str, ...]:
    return tuple(FULL if i % 2 else WINDOWED for i in range(number))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma2Config(DecoderConfig):
    """Sizes and constants of a Gemma 2 model; fields as in Hugging Face's `Gemma2Config`."""

    file_format: ClassVar[FileFormat] = FileFormat(
        model_type="gemma2",
        architecture="Gemma2ForCausalLM",
        constant={"hidden_activation": "gelu_pytorch_tanh"},
        unwritten={"attention_bias": False},
        layer_types=_alternating,
        read=read_activation,
    )
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int = 256000
    head_dim: int | None = 256
    max_position_embeddings: int = 8192
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    sliding_window: int | None = 4096
    layer_types: tuple[str, ...] | None = None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    query_pre_attn_scalar: int = 256
    """Number of which scores are divided by the root."""
    attn_logit_softcapping: float | None = 50.0
    final_logit_softcapping: float | None = 30.0

    @property
    def architecture(self) -> Architecture:
        return gemma_architecture(
            layer_kinds(self),
            hidden_size=self.hidden_size,
            query_pre_attn_scalar=self.query_pre_attn_scalar,
            attn_logit_softcapping=self.attn_logit_softcapping,
            final_logit_softcapping=self.final_logit_softcapping,
            head_norms=False,
        )
