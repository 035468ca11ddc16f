"""Qwen3 with experts in every layer."""

import dataclasses
from typing import Any, ClassVar

from grpo_eqx.models.architecture import QKV, Architecture, ExpertsShape
from grpo_eqx.models.config_fields import WINDOWED
from grpo_eqx.models.decoder_config import DecoderConfig, FileFormat, layer_kinds
from grpo_eqx.models.families.qwen_windows import write_windows
from grpo_eqx.models.rotary import RopeScaling


def _read(fields: dict[str, Any]) -> dict[str, Any]:
    """Keeps a window that is in use, for every layer; transformers 5 can rename `num_experts`."""
    fields = dict(fields)
    fields.pop("max_window_layers", None)
    layers = fields.get("num_hidden_layers")
    if not fields.pop("use_sliding_window", False):
        fields.pop("sliding_window", None)
    elif isinstance(layers, int):
        fields = {"sliding_window": 4096, **fields, "layer_types": [WINDOWED] * layers}
    if fields.get("num_experts") in (None, fields.get("num_local_experts")):
        fields["num_experts"] = fields.pop("num_local_experts", None)
    return {
        key: value for key, value in fields.items() if key != "num_experts" or value is not None
    }


def _write(fields: dict[str, Any]) -> dict[str, Any]:
    fields = write_windows(fields)
    fields.pop("layer_types", None)
    return fields


_SIZES: dict[str, dict[str, Any]] = {
    "30B-A3B": dict(hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768,
                    num_hidden_layers=48, num_attention_heads=32),
    "235B-A22B": dict(hidden_size=4096, intermediate_size=12288, moe_intermediate_size=1536,
                      num_hidden_layers=94, num_attention_heads=64),
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig(DecoderConfig):
    """Sizes and constants of a Qwen3 model with experts; as in Hugging Face's `Qwen3MoeConfig`."""

    file_format: ClassVar[FileFormat] = FileFormat(
        model_type="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        constant={"hidden_act": "silu", "decoder_sparse_step": 1, "mlp_only_layers": []},
        read=_read,
        write=_write,
    )
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int = 6144
    """Size of the MLP in layers without experts, of which there are none."""
    moe_intermediate_size: int = 768
    num_experts: int = 128
    num_experts_per_tok: int = 8
    norm_topk_prob: bool = False
    vocab_size: int = 151936
    head_dim: int | None = None
    max_position_embeddings: int = 32768
    rope_theta: float = 1_000_000.0
    rope_scaling: RopeScaling | None = None
    sliding_window: int | None = None
    layer_types: tuple[str, ...] | None = None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False

    @property
    def architecture(self) -> Architecture:
        experts = ExpertsShape(
            number=self.num_experts,
            per_token=self.num_experts_per_tok,
            intermediate_size=self.moe_intermediate_size,
            normalized=self.norm_topk_prob,
        )
        biased = QKV | {"o_proj"} if self.attention_bias else frozenset()
        return Architecture(
            layers=layer_kinds(self), biased=biased, head_norms=True, experts=experts
        )

    @classmethod
    def published(cls, name: str) -> "Qwen3MoeConfig | None":
        size = name.removeprefix("Qwen/Qwen3-")
        if size == name or size not in _SIZES:
            return None
        return cls(
            **_SIZES[size],
            num_key_value_heads=4,
            head_dim=128,
            norm_topk_prob=True,
            max_position_embeddings=40960,
        )
