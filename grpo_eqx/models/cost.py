"""FLOPs and bytes of a model's arithmetic: the one place that counts them from its sizes.

Metrics, the choice of a rollout's layout and the planner read them. What a program does on
a device, padding and recomputation included, the planner reads from the compiled program instead.
"""

import collections
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from grpo_eqx.models.config import ModelConfig


def num_parameters(config: ModelConfig) -> int:
    """Counts the parameters of all matrices, the embedding included, once if the head shares it."""
    tables = 1 if config.tie_word_embeddings else 2
    return config.num_layer_parameters + tables * config.num_head_parameters


def rollout_flops(
    config: ModelConfig,
    prompt_lengths: Int[np.ndarray, " P"],
    completion_lengths: Int[np.ndarray, "P G"],
) -> float:
    """Counts the FLOPs of prefill and decoding, or of a pass that scores the same tokens.

    Each token takes 2 per parameter of the matrices that it passes through, the head only for
    completions, and 4 per layer and dimension of its query heads for each key that its query sees.
    """
    products, seen = _forward(config, prompt_lengths, completion_lengths)
    return float(2 * products + 4 * _query_width(config) * seen)


def update_flops(
    config: ModelConfig,
    prompt_lengths: Int[np.ndarray, " P"],
    completion_lengths: Int[np.ndarray, "P G"],
    *,
    frozen: bool = False,
) -> float:
    """Counts the FLOPs of an update, forward and backward, as in PaLM (arXiv 2204.02311, app. B).

    Each token takes 6 per parameter of the matrices that it passes through, the head only for
    completions, or 4 where these are frozen, beneath adapters that are too small to count. It takes
    12 per layer and dimension of its query heads for each key that its query sees; unlike in PaLM,
    keys that causality or a window hides are not counted. Recomputation is not counted either.
    """
    products, seen = _forward(config, prompt_lengths, completion_lengths)
    return float((4 if frozen else 6) * products + 12 * _query_width(config) * seen)


def token_flops(config: ModelConfig) -> int:
    """Counts the FLOPs of the products that one token needs in decoding, without attention."""
    return 2 * (config.num_active_parameters + config.num_head_parameters)


class WeightCost(NamedTuple):
    """Cost of each weight in a pass over a micro-batch, with everything recomputed."""

    flops: int
    """FLOPs for each token."""
    num_bytes: int
    """Bytes read and written in main memory, however many tokens there are."""

    @classmethod
    def of_score(cls) -> "WeightCost":
        """Returns the cost without gradients: one product, which reads a bfloat16 weight once."""
        return cls(2, 2)

    @classmethod
    def of_update(cls, *, frozen: bool) -> "WeightCost":
        """Returns the cost with gradients.

        Two products of the forward pass, computed twice, and one for the gradient of its input read
        a bfloat16 weight three times. A weight that is not frozen takes one product more, which
        reads and writes its float32 gradient.
        """
        return cls(6, 6) if frozen else cls(8, 14)


def decode_bytes(
    config: ModelConfig,
    prompt_lengths: Int[np.ndarray, " P"],
    completion_lengths: Int[np.ndarray, "P G"],
    *,
    num_decode_steps: int,
    num_copies: int,
    itemsize: int,
    kv_itemsize: float,
) -> float:
    """Counts the bytes that decoding must read from memory, over all devices.

    Every step reads each of the `num_copies` copies of the weights and the live keys and values: a
    group's prompt once while any of its completions is live, and each live completion's own so far.
    Of experts, all are counted, as if the tokens of each step reached every one. The prompts'
    prefill is not counted: it is compute-bound.

    **Arguments:**

    - `prompt_lengths`, `completion_lengths`: tokens of each prompt and completion.
    - `num_decode_steps`: times that a next token was computed for all live completions.
    - `num_copies`: groups of devices that hold all weights.
    - `itemsize`, `kv_itemsize`: bytes of a weight, and of a number of a key or a value.
    """
    prompts, completions = _floats(prompt_lengths, completion_lengths)
    weights = config.num_layer_parameters + config.num_head_parameters
    longest, last = completions.max(axis=1) - 1, prompts - 1
    positions = 0.0
    for window, layers in collections.Counter(config.windows).items():
        of_prompts = _seen(prompts + longest, window) - _seen(last, window)
        of_prompts -= _seen(longest, window)
        own = _seen(completions - 1, window)
        positions += layers * (of_prompts.sum() + own.sum())
    weight_bytes = itemsize * num_decode_steps * num_copies * weights
    return float(weight_bytes + _kv_bytes(config, kv_itemsize) * positions)


def cache_bytes(config: ModelConfig, kv_itemsize: float) -> float:
    """Counts the bytes of the keys and values of one position in all layers."""
    return config.num_hidden_layers * _kv_bytes(config, kv_itemsize)


def activation_bytes(config: ModelConfig, itemsize: int) -> int:
    """Counts the bytes of one token's hidden state between two layers."""
    return config.hidden_size * itemsize


def projected_bytes(config: ModelConfig, itemsize: int) -> float:
    """Estimates the bytes of what a layer's products make of one token's hidden state.

    They are the queries, keys and values, and what the MLP's first two products make. About two
    thirds of a layer's parameters are in these five matrices.
    """
    widths = 2 / 3 * config.num_active_parameters / config.num_hidden_layers / config.hidden_size
    return widths * itemsize


def logits_bytes(config: ModelConfig) -> int:
    """Counts the bytes of one token's logits, which are float32."""
    return 4 * config.vocab_size


def _kv_bytes(config: ModelConfig, kv_itemsize: float) -> float:
    """Counts the bytes of the keys and values of one position in one layer."""
    return 2 * config.num_key_value_heads * config.head_size * kv_itemsize


def _query_width(config: ModelConfig) -> int:
    return config.num_attention_heads * config.head_size


def _forward(
    config: ModelConfig,
    prompt_lengths: Int[np.ndarray, " P"],
    completion_lengths: Int[np.ndarray, "P G"],
) -> tuple[float, float]:
    """Counts what a forward pass multiplies.

    **Returns:** the pairs of a token and a parameter that it passes through; the pairs of a query
    and a key that it sees, over all layers.
    """
    prompts, completions = _floats(prompt_lengths, completion_lengths)
    tokens = prompts.sum() + completions.sum()
    products = config.num_active_parameters * tokens
    products += config.num_head_parameters * completions.sum()
    last = prompts[:, None] - 1  # a completion's first query is its prompt's last
    seen = 0.0
    for window, layers in collections.Counter(config.windows).items():
        of_completions = _seen(last + completions, window) - _seen(last, window)
        seen += layers * (_seen(prompts, window).sum() + of_completions.sum())
    return products, seen


def _seen(lengths: Float[np.ndarray, "*P"], window: int | None) -> Float[np.ndarray, "*P"]:
    """Counts the pairs of a query and a key that it sees, in sequences of these lengths."""
    within = lengths if window is None else np.minimum(lengths, window)
    return within * (within + 1) / 2 + (lengths - within) * within


def _floats(*lengths: Int[np.ndarray, "..."]) -> list[Float[np.ndarray, "..."]]:
    # The FLOPs of a pod's batch may exceed what an integer holds.
    return [each.astype(np.float64) for each in lengths]
