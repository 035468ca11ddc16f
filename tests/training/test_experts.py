"""Sampling, scores and updates of a model with experts: the same on one device and on many."""

import functools
from typing import Any

import jax
import numpy as np
import pytest

from grpo_eqx.models import Decoder, Qwen3MoeConfig
from grpo_eqx.models.lora import Lora, linear_names, with_adapters
from grpo_eqx.sharding import (
    LegacySharding,
    MaxTextSharding,
    ReplicatedSharding,
    RolloutSharding,
    TensorSharding,
)

from .runner import Batch, Runner, Sample, make_runner

CONFIG = Qwen3MoeConfig(
    vocab_size=32,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_experts=6,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    norm_topk_prob=True,
)
P, G, TP, TC = 8, 4, 5, 8
PROMPTS = [
    ids[:length].tolist()
    for ids, length in zip(
        np.random.default_rng(0).integers(4, 32, (P, TP)),
        np.random.default_rng(1).integers(1, TP + 1, P),
        strict=True,
    )
]
runner_on = functools.cache(functools.partial(make_runner, CONFIG.vocab_size, TP, TC))


def model_on(mesh: jax.sharding.Mesh) -> Decoder:
    model = Decoder.init(CONFIG, jax.random.key(0), std=0.2)
    return jax.device_put(model, model.shardings(mesh))


@pytest.fixture(scope="module")
def rollout() -> Sample:
    one = runner_on()
    return one.sample(model_on(one.mesh), PROMPTS, G)


@pytest.fixture(scope="module")
def batch(rollout: Sample) -> Batch:
    rng = np.random.default_rng(2)
    old = rng.normal(0, 0.3, (P, G, TC)).astype(np.float32)
    return Batch(rollout, rng.normal(size=(P, G)).astype(np.float32), rollout.logps + old)


def step_of(runner: Runner, batch: Batch) -> tuple[Decoder, dict[str, float]]:
    """The change of every parameter in one update, and its metrics."""
    model = model_on(runner.mesh)
    before = jax.tree.map(np.asarray, model)
    state, metrics = runner.update(runner.updater.init(model), batch)
    return jax.tree.map(lambda a, b: np.asarray(b) - a, before, state.model), metrics


@pytest.fixture(scope="module")
def whole_step(batch: Batch) -> tuple[Decoder, dict[str, float]]:
    return step_of(runner_on(), batch)


@pytest.mark.grid
@pytest.mark.parametrize(
    ("mesh", "num_devices", "options"),
    [
        ("2,2,2", 8, dict(micro=4, remat="dots")),
        ("1,4,1", 4, {}),
        pytest.param("1,1,4", 4, dict(remat="full"), marks=pytest.mark.slow),
        pytest.param("auto", 1, dict(micro=2), marks=pytest.mark.slow),
    ],
)
def test_micro_batches_and_devices_leave_the_update_unchanged(
    mesh: str,
    num_devices: int,
    options: dict[str, Any],
    batch: Batch,
    whole_step: tuple[Decoder, dict[str, float]],
) -> None:
    changes, metrics = step_of(runner_on(mesh, num_devices, **options), batch)
    for change, expected in zip(
        jax.tree.leaves(changes), jax.tree.leaves(whole_step[0]), strict=True
    ):
        assert np.linalg.norm(expected) > 0
        assert np.linalg.norm(change - expected) < 2e-5 * np.linalg.norm(expected)
    for name, value in whole_step[1].items():
        np.testing.assert_allclose(metrics[name], value, rtol=2e-5, atol=2e-6, err_msg=name)


@pytest.mark.grid
@pytest.mark.parametrize(
    ("sharding", "mesh", "num_devices", "num_prompts"),
    [
        (ReplicatedSharding(), "1,4,1", 4, P),
        (TensorSharding(4), "2,2,2", 8, P),
        (LegacySharding(), "2,2,2", 8, P),
        (LegacySharding(), "2,2,2", 8, 4),  # the groups over tp
        (MaxTextSharding(), "2,2,2", 8, P),
        pytest.param(TensorSharding(2), "1,4,1", 4, P, marks=pytest.mark.slow),
        pytest.param(LegacySharding(), "1,4,1", 4, P, marks=pytest.mark.slow),
    ],
)
def test_the_same_tokens_on_one_device_and_on_many(
    rollout: Sample, sharding: RolloutSharding, mesh: str, num_devices: int, num_prompts: int
) -> None:
    many = runner_on(mesh, num_devices, rollout_sharding=sharding)
    other = many.sample(model_on(many.mesh), PROMPTS[:num_prompts], G)
    expected = rollout.picked(slice(num_prompts))
    np.testing.assert_array_equal(other.ids, expected.ids)
    np.testing.assert_allclose(other.logps, expected.logps, atol=1e-5)


def test_scores_equal_what_the_sampler_reported(rollout: Sample) -> None:
    runner = runner_on("2,2,2", 8)
    scores = runner.score(model_on(runner.mesh), rollout)
    mask = rollout.mask
    np.testing.assert_allclose(scores.logps[mask], rollout.logps[mask], atol=1e-4)


def test_experts_have_no_adapters() -> None:
    model = model_on(runner_on().mesh)
    assert linear_names(model) == ["q_proj", "k_proj", "v_proj", "o_proj"]
    adapted = with_adapters(model, Lora(rank=2, alpha=4.0), jax.random.key(1))
    assert not any(jax.tree.leaves(adapted.trainable.layers.experts))
