"""Throughput and utilisation: counts by hand, against XLA's own count, and the metrics' rules."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float

from grpo_eqx.models.config import Qwen2Config
from grpo_eqx.models.qwen2 import Qwen2
from grpo_eqx.tracking.device_peaks import DevicePeaks, device_peaks
from grpo_eqx.tracking.performance import (
    Work,
    head_parameters,
    layer_parameters,
    performance_metrics,
    rollout_bytes,
    update_flops,
)

# Two layers of 16 + 8 + 8 + 16 parameters for attention and 36 for the MLP, a head of 20.
TINY = Qwen2Config(
    hidden_size=4,
    intermediate_size=3,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    vocab_size=5,
)
PROMPTS = np.array([2])
COMPLETIONS = np.array([[1, 3]])
PEAKS = DevicePeaks(flops_per_second=1000.0, bytes_per_second=100.0)


def tiny_metrics(peaks: DevicePeaks | None, num_devices: int = 1, tp: int = 1) -> dict[str, float]:
    return performance_metrics(
        TINY,
        rollout=Work(PROMPTS, COMPLETIONS, seconds=4.0),
        num_decode_steps=3,
        update=Work(PROMPTS, COMPLETIONS, seconds=8.0),
        num_iterations=2,
        peaks=peaks,
        num_devices=num_devices,
        tp=tp,
        itemsize=2,
        kv_itemsize=2.0,
    )


def test_parameters_are_those_of_the_models_matrices(key: jax.Array) -> None:
    model = Qwen2.init(TINY, key)
    stacked = [x.size for x in jax.tree.leaves(model.layers) if x.ndim == 3]
    assert layer_parameters(TINY) == sum(stacked) == 168
    assert head_parameters(TINY) == model.head.size == 20


def test_flops_of_an_update_by_hand() -> None:
    # 6 tokens go through the layers, 4 of them through the head.
    products = 6 * (6 * 168 + 4 * 20)
    # The prompt's tokens see 1 and 2 keys, the completions' inputs 2, and 2, 3, 4.
    attention = 12 * 2 * 4 * (1 + 2 + 2 + 2 + 3 + 4)
    assert update_flops(TINY, PROMPTS, COMPLETIONS) == products + attention


def test_bytes_of_a_rollout_by_hand() -> None:
    # The prompt is read at all three steps; the completions have 0, and 0, 1, 2 positions so far.
    positions = 3 * 2 + 0 + 0 + 1 + 2
    weights = 3 * (168 + 20)
    position = 2 * 2 * 1 * 2
    of_one_copy = rollout_bytes(
        TINY, PROMPTS, COMPLETIONS, num_decode_steps=3, num_copies=1, itemsize=2, kv_itemsize=2.0
    )
    assert of_one_copy == 2 * (weights + position * positions)
    of_two = rollout_bytes(
        TINY, PROMPTS, COMPLETIONS, num_decode_steps=3, num_copies=2, itemsize=4, kv_itemsize=4.0
    )
    assert of_two == 4 * (2 * weights + position * positions)


def test_work_adds_up_over_prompts() -> None:
    twice = update_flops(TINY, np.tile(PROMPTS, 2), np.tile(COMPLETIONS, (2, 1)))
    assert twice == 2 * update_flops(TINY, PROMPTS, COMPLETIONS)


def test_a_group_costs_less_than_its_completions_alone() -> None:
    alone = update_flops(TINY, np.repeat(PROMPTS, 2), COMPLETIONS.T)
    shared = update_flops(TINY, PROMPTS, COMPLETIONS)
    prompt = update_flops(TINY, PROMPTS, np.array([[0]]))
    assert shared == alone - prompt


def test_no_length_overflows() -> None:
    config = Qwen2Config.from_name("72B")
    lengths = np.full((1024, 16), 32768, np.int32)
    flops = update_flops(config, lengths[:, 0], lengths)
    assert flops > 6 * 72e9 * lengths.sum(dtype=float)


def test_flops_are_those_that_xla_counts() -> None:
    config = Qwen2Config(
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=1,  # XLA counts a loop's body once
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=1024,
    )
    P, G, T = 2, 3, 8
    model = jax.eval_shape(lambda key: Qwen2.init(config, key), jax.random.key(0))
    prompt_ids = jax.ShapeDtypeStruct((P, T), jnp.int32)
    ids = jax.ShapeDtypeStruct((P, G, T), jnp.int32)

    def forward(model: Qwen2, prompt_ids: Array, ids: Array) -> Float[Array, ""]:
        prompt = model.prefill(prompt_ids, jnp.ones(prompt_ids.shape, bool))
        return model.project_logits(model.completion_hidden(prompt, ids)).sum()

    def counted(function: Callable[..., object]) -> float:
        return jax.jit(function).lower(model, prompt_ids, ids).cost_analysis()["flops"]

    flops = update_flops(config, np.full(P, T), np.full((P, G), T))
    assert counted(forward) == pytest.approx(flops / 3, rel=0.03)
    assert counted(jax.value_and_grad(forward)) == pytest.approx(flops, rel=0.03)


def test_metrics_by_hand() -> None:
    metrics = tiny_metrics(PEAKS)
    flops, read = 2 * 7872, 2 * (564 + 8 * 9)
    assert metrics == pytest.approx(
        {
            "perf/tokens_per_second/rollout": 4 / 4,
            "perf/tokens_per_second/update": 2 * 6 / 8,
            "perf/mfu/update": flops / (8 * 1000),
            "perf/bandwidth_utilization/rollout": read / (4 * 100),
        }
    )


def test_metrics_count_all_devices() -> None:
    one, four = tiny_metrics(PEAKS), tiny_metrics(PEAKS, num_devices=4, tp=4)
    assert four["perf/tokens_per_second/update"] == one["perf/tokens_per_second/update"]
    for name in ("perf/mfu/update", "perf/bandwidth_utilization/rollout"):
        assert four[name] == pytest.approx(one[name] / 4)


def test_devices_that_hold_whole_weights_each_read_them() -> None:
    split = tiny_metrics(PEAKS, num_devices=4, tp=4)["perf/bandwidth_utilization/rollout"]
    copied = tiny_metrics(PEAKS, num_devices=4, tp=1)["perf/bandwidth_utilization/rollout"]
    assert copied - split == pytest.approx(3 * 2 * 564 / (4 * 4 * 100))


def test_unknown_devices_have_no_utilisation() -> None:
    assert device_peaks(jax.devices("cpu")[0].device_kind) is None
    assert tiny_metrics(None).keys() == {
        "perf/tokens_per_second/rollout",
        "perf/tokens_per_second/update",
    }


def test_peaks_are_of_a_jax_device() -> None:
    # A TPU7x chip, of 2,307 TFLOP/s, is two devices.
    assert device_peaks("TPU7x") == DevicePeaks(1153.5e12, 3690e9)
    assert device_peaks("TPU v5 lite") == device_peaks("TPU v5e")
    # Another product than the H100 80GB HBM3.
    assert device_peaks("NVIDIA H100 NVL") is None
