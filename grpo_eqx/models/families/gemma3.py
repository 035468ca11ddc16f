"""Gemma 3, text only (arXiv 2503.19786)."""

import dataclasses
import functools
from typing import Any, ClassVar

from grpo_eqx.models.architecture import Architecture, LayerKind
from grpo_eqx.models.config_fields import FULL, WINDOWED
from grpo_eqx.models.decoder_config import DecoderConfig, FileFormat
from grpo_eqx.models.families.gemma import gemma_architecture, read_activation
from grpo_eqx.models.rotary import Rope, RopeScaling

_ROPES = "rope_scaling", "rope_parameters"


def _one_in(every: int, number: int) -> tuple[str, ...]:
    """One layer that sees everything after each run of layers with a window."""
    return tuple(WINDOWED if (i + 1) % every else FULL for i in range(number))


def _read(fields: dict[str, Any]) -> dict[str, Any]:
    fields, layers = read_activation(fields), fields.get("num_hidden_layers")
    every = fields.pop("sliding_window_pattern", fields.pop("_sliding_window_pattern", None))
    if every is not None and fields.get("layer_types") is None and isinstance(layers, int):
        fields["layer_types"] = list(_one_in(every, layers))
    ropes = fields.get("rope_parameters")
    if isinstance(ropes, dict) and {FULL, WINDOWED} & set(ropes):  # one for each kind of layer
        local = dict(ropes.get(WINDOWED) or {})
        fields["rope_local_base_freq"] = local.pop("rope_theta", 10_000.0)
        if local.pop("rope_type", "default") == "default" and not local:
            fields["rope_parameters"] = {"rope_theta": 1_000_000.0, **(ropes.get(FULL) or {})}
    elif not any((fields.get(name) or {}).get("rope_theta") for name in _ROPES):
        fields = {"rope_theta": 1_000_000.0, **fields}
    return fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma3Config(DecoderConfig):
    """Sizes and constants of a Gemma 3 model; fields as in Hugging Face's `Gemma3TextConfig`."""

    file_format: ClassVar[FileFormat] = FileFormat(
        model_type="gemma3_text",
        architecture="Gemma3ForCausalLM",
        constant={"hidden_activation": "gelu_pytorch_tanh"},
        unwritten={"attention_bias": False},
        layer_types=functools.partial(_one_in, 6),
        read=_read,
    )
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int = 262_208
    head_dim: int | None = 256
    max_position_embeddings: int = 131_072
    rope_theta: float = 1_000_000.0
    """Rotary base of layers that see everything, to which `rope_scaling` belongs."""
    rope_scaling: RopeScaling | None = None
    rope_local_base_freq: float = 10_000.0
    """Rotary base of layers with a window."""
    sliding_window: int | None = 4096
    layer_types: tuple[str, ...] | None = None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    query_pre_attn_scalar: int = 256
    """Number of which scores are divided by the root."""
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None

    @property
    def architecture(self) -> Architecture:
        windowed = LayerKind(Rope(self.rope_local_base_freq), self.sliding_window)
        layers = tuple(
            windowed if each == WINDOWED else LayerKind(self.rope) for each in self.types
        )
        return gemma_architecture(
            layers,
            hidden_size=self.hidden_size,
            query_pre_attn_scalar=self.query_pre_attn_scalar,
            attn_logit_softcapping=self.attn_logit_softcapping,
            final_logit_softcapping=self.final_logit_softcapping,
            head_norms=True,
        )
