"""Architecture and file format that the generations of Gemma share."""

from typing import Any

from grpo_eqx.models.architecture import Architecture, LayerKind


def gemma_architecture(
    layers: tuple[LayerKind, ...],
    *,
    hidden_size: int,
    query_pre_attn_scalar: int,
    attn_logit_softcapping: float | None,
    final_logit_softcapping: float | None,
    head_norms: bool,
) -> Architecture:
    """Returns the architecture: norms on both sides, their scales around one, tanh-GELU."""
    return Architecture(
        layers=layers,
        head_norms=head_norms,
        output_norms=True,
        norm_offset=1.0,
        activation="gelu_tanh",
        embedding_scale=hidden_size**0.5,
        score_scale=query_pre_attn_scalar**-0.5,
        score_softcap=attn_logit_softcapping,
        logit_softcap=final_logit_softcapping,
    )


def read_activation(fields: dict[str, Any]) -> dict[str, Any]:
    """Drops the older field of the activation, which transformers ignores beside the newer one."""
    fields = dict(fields)
    old = fields.pop("hidden_act", None)
    if fields.get("hidden_activation") is None and old not in (None, "gelu", "gelu_pytorch_tanh"):
        fields["hidden_activation"] = old  # to be refused
    return fields
