"""The small model of the benchmarks: that of step.py, which peers build for themselves."""

from grpo_eqx.models.families.qwen2 import Qwen2Config


def small_model(vocab_size: int) -> Qwen2Config:
    """4.2 million parameters and the embedding's."""
    return Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=2,
    )
