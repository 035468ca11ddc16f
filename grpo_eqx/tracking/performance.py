"""Speed of a step: tokens per second, and shares of the peaks of its devices.

Only work that the algorithm requires counts: real tokens, each prompt once for its group. Padding,
recomputation in the backward pass, and communication do not count.

A prompt's last token is the first input of its completions, and a completion's last token is never
an input. So the input for token `k` of a completion, counted from 0, attends to the prompt and `k`
tokens.
"""

import dataclasses

import numpy as np
from jaxtyping import Int

from grpo_eqx.models.config import ModelConfig
from grpo_eqx.models.cost import decode_bytes, update_flops
from grpo_eqx.tracking.device_peaks import DevicePeaks


@dataclasses.dataclass(frozen=True)
class Work:
    """Groups that were generated or trained on, and the seconds that this took."""

    prompt_lengths: Int[np.ndarray, " P"]
    completion_lengths: Int[np.ndarray, "P G"]
    seconds: float


def performance_metrics(
    config: ModelConfig,
    *,
    rollout: Work,
    num_decode_steps: int,
    update: Work,
    num_iterations: int,
    frozen: bool,
    peaks: DevicePeaks | None,
    num_devices: int,
    num_copies: int,
    itemsize: int,
    kv_itemsize: float,
) -> dict[str, float]:
    """Computes a step's throughput, and its fractions of the devices' peaks.

    **Arguments:**

    - `rollout`, `update`: the work of all devices together.
    - `num_decode_steps`: times that the rollout computed a next token for all live completions.
    - `num_iterations`: passes over the update's groups.
    - `frozen`: whether only adapters are trained.
    - `peaks`: the peaks of one device; without them, only tokens per second are computed.
    - `num_devices`: the number of devices.
    - `num_copies`: copies of the weights that the devices read for one token of each completion.
    - `itemsize`: bytes of a weight in the rollout.
    - `kv_itemsize`: bytes of an element of a head in the rollout's cache, with its share of padding
      and scales.
    """
    trained = update.prompt_lengths.sum() + update.completion_lengths.sum()
    metrics = {
        "perf/tokens_per_second/rollout": rollout.completion_lengths.sum() / rollout.seconds,
        "perf/tokens_per_second/update": num_iterations * trained / update.seconds,
    }
    if peaks is not None:
        flops = num_iterations * update_flops(
            config, update.prompt_lengths, update.completion_lengths, frozen=frozen
        )
        read = decode_bytes(
            config,
            rollout.prompt_lengths,
            rollout.completion_lengths,
            num_decode_steps=num_decode_steps,
            num_copies=num_copies,
            itemsize=itemsize,
            kv_itemsize=kv_itemsize,
        )
        flops_at_peak = num_devices * peaks.flops_per_second * update.seconds
        bytes_at_peak = num_devices * peaks.bytes_per_second * rollout.seconds
        metrics["perf/mfu/update"] = flops / flops_at_peak
        metrics["perf/bandwidth_utilization/rollout"] = read / bytes_at_peak
    return {name: float(value) for name, value in metrics.items()}


def throughput_metrics(
    valid_tokens: int, *, step_seconds: float, update_seconds: float
) -> dict[str, float]:
    """Computes the valid tokens per second of a step, and of its updates.

    **Arguments:**

    - `valid_tokens`: tokens of completions in the step's loss, each counted once, however many
      passes the updates make.
    - `step_seconds`, `update_seconds`: seconds of the whole step, and of its updates.
    """
    return {
        "throughput/train/valid_tokens_per_s": valid_tokens / step_seconds,
        "throughput/train/valid_tokens_per_s_update": valid_tokens / update_seconds,
    }
