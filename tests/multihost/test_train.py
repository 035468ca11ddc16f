"""A run is the same run on one device, on many, and over several hosts."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from grpo_eqx.data.tokenizer import ChatTokenizer
from grpo_eqx.models.pretrained import model_folder, save_pretrained
from grpo_eqx.models.qwen2 import Qwen2
from grpo_eqx.models.qwen2_config import Qwen2Config

pytestmark = pytest.mark.slow

OF_THE_MACHINE = ("time/", "perf/", "compile/", "step_time")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two heads of keys, and sizes that 16 devices divide; small, for all is compiled often."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = ChatTokenizer.from_pretrained(model_folder("tiny_qwen2"))
    config = Qwen2Config(
        vocab_size=len(tokenizer.tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    save_pretrained(Qwen2.init(config, jax.random.key(0), std=0.2), folder)
    tokenizer.save_pretrained(folder)
    return folder


def trained(
    pod: Any, model: Path, out: Path, devices: list[int], beta: float, runs: list[str]
) -> list[Any]:
    """What every process made of every run, each a mesh and a rollout sharding."""
    out.mkdir()
    for outcome in pod.run("train_worker.py", devices, model, out, beta, *runs).values():
        assert outcome.code == 0, outcome.output
    made = [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))]
    assert len(made) == len(devices) * len(runs)
    return made


@pytest.fixture(scope="module")
def on_one_device(
    pod: Any, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[float], Any]:
    """Makes the run with a weight of the KL term on one device; once for each weight."""

    @functools.cache
    def make(beta: float) -> Any:
        out = tmp_path_factory.mktemp("alone") / "out"
        return trained(pod, model, out, [1], beta, ["auto/legacy"])[0]

    return make


@pytest.mark.parametrize(
    ("devices", "beta", "runs"),
    [
        (
            [8],
            0.0,
            ["auto/legacy", "2,4,1/maxtext", "1,4,2/legacy", "1,4,2/maxtext", "1,1,2 of 2/legacy"],
        ),
        ([4, 4], 0.05, ["auto/legacy", "auto/maxtext"]),
        ([4] * 4, 0.0, ["host_local/legacy", "host_local/maxtext"]),
    ],
    ids=["1 host", "2 hosts", "4 hosts"],
)
def test_devices_and_hosts_leave_a_run_unchanged(
    pod: Any,
    model: Path,
    on_one_device: Callable[[float], Any],
    tmp_path: Path,
    devices: list[int],
    beta: float,
    runs: list[str],
) -> None:
    alone = on_one_device(beta)
    assert len(np.unique([metrics["reward"] for metrics in alone["history"]])) == 3
    for made in trained(pod, model, tmp_path / "out", devices, beta, runs):
        assert made["tokens"] == alone["tokens"]
        for metrics, expected in zip(made["history"], alone["history"], strict=True):
            assert metrics.keys() == expected.keys()
            for name, value in expected.items():
                if name.startswith(OF_THE_MACHINE):
                    continue
                if name.startswith("reward"):
                    assert metrics[name] == value
                rtol = 0.0 if name == "loss" else 1e-4
                np.testing.assert_allclose(metrics[name], value, rtol=rtol, atol=1e-5, err_msg=name)
