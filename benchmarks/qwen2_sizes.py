"""Architectures by size: the embedded model's, that of step.py, and Qwen2.5's."""

from grpo_eqx.models.families.qwen2 import Qwen2Config


def _qwen2_5(
    hidden_size: int, intermediate_size: int, layers: int, heads: int, key_heads: int
) -> Qwen2Config:
    small = hidden_size <= 2048  # these tie the head to the embedding, and pad the vocabulary less
    return Qwen2Config(
        vocab_size=151_936 if small else 152_064,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        tie_word_embeddings=small,
    )


MODELS = {
    "tiny": Qwen2Config(
        vocab_size=448,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    ),
    "small": Qwen2Config(
        vocab_size=8192,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=2,
    ),
    "0.5B": _qwen2_5(896, 4864, 24, 14, 2),
    "1.5B": _qwen2_5(1536, 8960, 28, 12, 2),
    "3B": _qwen2_5(2048, 11_008, 36, 16, 2),
    "7B": _qwen2_5(3584, 18_944, 28, 28, 4),
    "14B": _qwen2_5(5120, 13_824, 48, 40, 8),
    "32B": _qwen2_5(5120, 27_648, 64, 40, 8),
    "72B": _qwen2_5(8192, 29_568, 80, 64, 8),
}
"""By name."""
