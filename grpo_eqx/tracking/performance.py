"""How fast a step is, and how near that comes to what its devices can do.

What counts as work is what the algorithm asks for: real tokens, each prompt once for its group.
Padding, what is computed again in the backward pass, and communication are none.

A prompt's last token is the first input of its completions, and a completion's last token is no
input: so the input for its token `k`, counted from 0, sees its prompt and `k` tokens.
"""

import dataclasses

import numpy as np
from jaxtyping import Int

from grpo_eqx.models.config import Qwen2Config
from grpo_eqx.tracking.device_peaks import DevicePeaks


@dataclasses.dataclass(frozen=True)
class Work:
    """Groups that were generated, or learned from, and the time that took."""

    prompt_lengths: Int[np.ndarray, " P"]
    completion_lengths: Int[np.ndarray, "P G"]
    seconds: float


def performance_metrics(
    config: Qwen2Config,
    *,
    rollout: Work,
    num_decode_steps: int,
    update: Work,
    num_iterations: int,
    peaks: DevicePeaks | None,
    num_devices: int,
    tp: int,
    itemsize: int,
    kv_itemsize: float,
) -> dict[str, float]:
    """A step's throughput, and its shares of the devices' peaks.

    **Arguments:**

    - `rollout`, `update`: the work of all devices together.
    - `num_decode_steps`: how often the rollout computed a next token for all live completions.
    - `num_iterations`: passes over the update's groups.
    - `peaks`: of one device; without them there are only tokens per second.
    - `num_devices`, `tp`: the size of the mesh, and of its axis `tp`.
    - `itemsize`, `kv_itemsize`: bytes of a weight as the rollout computes with it, and of a number
      in its cache.
    """
    trained = update.prompt_lengths.sum() + update.completion_lengths.sum()
    metrics = {
        "perf/tokens_per_second/rollout": rollout.completion_lengths.sum() / rollout.seconds,
        "perf/tokens_per_second/update": num_iterations * trained / update.seconds,
    }
    if peaks is not None:
        flops = num_iterations * update_flops(
            config, update.prompt_lengths, update.completion_lengths
        )
        read = rollout_bytes(
            config,
            rollout.prompt_lengths,
            rollout.completion_lengths,
            num_decode_steps=num_decode_steps,
            num_copies=num_devices // tp,
            itemsize=itemsize,
            kv_itemsize=kv_itemsize,
        )
        flops_at_peak = num_devices * peaks.flops_per_second * update.seconds
        bytes_at_peak = num_devices * peaks.bytes_per_second * rollout.seconds
        metrics["perf/mfu/update"] = flops / flops_at_peak
        metrics["perf/bandwidth_utilization/rollout"] = read / bytes_at_peak
    return {name: float(value) for name, value in metrics.items()}


def update_flops(
    config: Qwen2Config,
    prompt_lengths: Int[np.ndarray, " P"],
    completion_lengths: Int[np.ndarray, "P G"],
) -> float:
    """FLOPs of one pass forward and backward: model FLOPs, as in PaLM (arXiv 2204.02311, app. B).

    Those are 6 for a token and each parameter of the matrices that it meets, the head only for
    completions, and for each query and key that it sees 12 in each of a layer's head dimensions.
    Unlike there, keys that causality hides are not counted.
    """
    prompts, completions = _floats(prompt_lengths, completion_lengths)
    tokens = prompts.sum() + completions.sum()
    products = layer_parameters(config) * tokens + head_parameters(config) * completions.sum()
    seen = (prompts * (prompts + 1) / 2).sum() + (
        prompts[:, None] * completions + completions * (completions - 1) / 2
    ).sum()
    width = config.num_attention_heads * config.head_size
    return float(6 * products + 12 * config.num_hidden_layers * width * seen)


def rollout_bytes(
    config: Qwen2Config,
    prompt_lengths: Int[np.ndarray, " P"],
    completion_lengths: Int[np.ndarray, "P G"],
    *,
    num_decode_steps: int,
    num_copies: int,
    itemsize: int,
    kv_itemsize: float,
) -> float:
    """Bytes that decoding cannot do without reading, on all devices together.

    At every step each of `num_copies` of the weights, and the live keys and values: a group's
    prompt once while any of its completions is live, and what each live completion has so far.
    The prompts' prefill is not counted: it is bound by arithmetic.
    """
    prompts, completions = _floats(prompt_lengths, completion_lengths)
    weights = layer_parameters(config) + head_parameters(config)
    longest = completions.max(axis=1)
    positions = (prompts * longest).sum() + (completions * (completions - 1) / 2).sum()
    position = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_size
    of_weights = itemsize * num_decode_steps * num_copies * weights
    return float(of_weights + kv_itemsize * position * positions)


def layer_parameters(config: Qwen2Config) -> int:
    """Parameters of all layers' matrices; biases and norms are too few to count."""
    queries = config.num_attention_heads * config.head_size
    keys = config.num_key_value_heads * config.head_size
    attention = 2 * config.hidden_size * (queries + keys)
    mlp = 3 * config.hidden_size * config.intermediate_size
    return config.num_hidden_layers * (attention + mlp)


def head_parameters(config: Qwen2Config) -> int:
    """Parameters of the language-model head; looking up an embedding is no product."""
    return config.vocab_size * config.hidden_size


def _floats(*lengths: np.ndarray) -> list[np.ndarray]:
    # A pod's batch has more FLOPs than an integer may hold.
    return [each.astype(np.float64) for each in lengths]
