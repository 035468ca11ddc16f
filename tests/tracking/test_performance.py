"""Throughput and utilization: the metrics by hand, and their rules."""

import jax
import numpy as np
import pytest

from grpo_eqx.models.families.qwen2 import Qwen2Config
from grpo_eqx.tracking.device_peaks import DevicePeaks, device_peaks
from grpo_eqx.tracking.performance import Work, performance_metrics, throughput_metrics

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


def tiny_metrics(
    peaks: DevicePeaks | None, num_devices: int = 1, num_copies: int = 1
) -> dict[str, float]:
    return performance_metrics(
        TINY,
        rollout=Work(PROMPTS, COMPLETIONS, seconds=4.0),
        num_decode_steps=3,
        update=Work(PROMPTS, COMPLETIONS, seconds=8.0),
        num_iterations=2,
        frozen=False,
        peaks=peaks,
        num_devices=num_devices,
        num_copies=num_copies,
        itemsize=2,
        kv_itemsize=2.0,
    )


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
    one, four = tiny_metrics(PEAKS), tiny_metrics(PEAKS, num_devices=4)
    assert four["perf/tokens_per_second/update"] == one["perf/tokens_per_second/update"]
    for name in ("perf/mfu/update", "perf/bandwidth_utilization/rollout"):
        assert four[name] == pytest.approx(one[name] / 4)


def test_devices_that_hold_whole_weights_each_read_them() -> None:
    split = tiny_metrics(PEAKS, num_devices=4)["perf/bandwidth_utilization/rollout"]
    copied = tiny_metrics(PEAKS, num_devices=4, num_copies=4)["perf/bandwidth_utilization/rollout"]
    assert copied - split == pytest.approx(3 * 2 * 564 / (4 * 4 * 100))


def test_unknown_devices_have_no_utilization() -> None:
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


def test_valid_tokens_are_those_of_the_loss_over_both_times() -> None:
    assert throughput_metrics(600, step_seconds=4.0, update_seconds=1.5) == {
        "throughput/train/valid_tokens_per_s": 150.0,
        "throughput/train/valid_tokens_per_s_update": 400.0,
    }
