"""Attention over whole sequences, with the best implementation for each kind of device."""

from grpo_eqx.models.causal_attention.base import BlockSizes, CausalAttention, Visible
from grpo_eqx.models.causal_attention.best import best_attention
from grpo_eqx.models.causal_attention.blocked import BlockedAttention
from grpo_eqx.models.causal_attention.cudnn import CudnnAttention
from grpo_eqx.models.causal_attention.mosaic_tpu import MosaicAttention

__all__ = [
    "BlockSizes",
    "BlockedAttention",
    "CausalAttention",
    "CudnnAttention",
    "MosaicAttention",
    "Visible",
    "best_attention",
]
