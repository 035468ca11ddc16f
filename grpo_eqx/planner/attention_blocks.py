"""Sizes of the blocks in which attention over whole sequences skips what no query sees."""

from typing import NamedTuple

from grpo_eqx.models.causal_attention import BlockedAttention, CausalAttention
from grpo_eqx.models.causal_attention.mosaic_tpu import MosaicAttention
from grpo_eqx.models.config import ModelConfig
from grpo_eqx.models.tiles import even_tile

_OTHER = 128
_CPU_VECTOR = 16
_TPU_SUBLANES, _TPU_LANES = 16, 128


class AttentionBlocks(NamedTuple):
    """Sizes of blocks."""

    queries: int
    """Most positions of a block of queries."""
    keys: int
    """Most positions of a block of keys."""
    per_wide: int = 1
    """Blocks in a wide block (`BlockedAttention.per_wide`)."""


def attention_blocks(
    attention: CausalAttention, model: ModelConfig, length: int
) -> AttentionBlocks:
    """Returns the sizes of blocks for rows of `length` tokens.

    They are those that `BlockedAttention` and `MosaicAttention` choose; for others, a guess.
    """
    if isinstance(attention, BlockedAttention):
        size = min(attention.block, even_tile(length, attention.block, _CPU_VECTOR))
        return AttentionBlocks(size, size, attention.per_wide)
    if isinstance(attention, MosaicAttention):
        repeats = model.num_attention_heads // model.num_key_value_heads
        queries = even_tile(length, attention.query_block // repeats, _TPU_SUBLANES)
        padded = -(-length // queries) * queries
        return AttentionBlocks(queries, even_tile(padded, attention.key_block, _TPU_LANES))
    return AttentionBlocks(_OTHER, _OTHER)
