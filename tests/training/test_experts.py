"""The three programs of a model with experts: the same on one device and on many."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpo_eqx.generation import Prompts, Rollout, Sampling, Stopping
from grpo_eqx.loss_backends import ChunkedLoss
from grpo_eqx.models import Decoder, Qwen3MoeConfig
from grpo_eqx.models.causal_attention import BlockedAttention
from grpo_eqx.models.lora import Lora, linear_names, with_adapters
from grpo_eqx.objective import Objective
from grpo_eqx.sharding import (
    LegacySharding,
    MaxTextSharding,
    ReplicatedSharding,
    RolloutSharding,
    TensorSharding,
    parse_mesh,
)
from grpo_eqx.training.batch import Batch
from grpo_eqx.training.options import ProgramOptions
from grpo_eqx.training.packing import Packing
from grpo_eqx.training.programs import Programs

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
OPTIONS = ProgramOptions(
    sampling=Sampling(temperature=0.7),
    max_prompt_length=TP,
    max_completion_length=TC,
    stopping=Stopping.of_ids([3], CONFIG.vocab_size),
    pad_id=0,
    seed=0,
    dtype=jnp.dtype("float32"),
    remat="none",
    attention=BlockedAttention(64),
    objective=Objective(epsilon=0.2, epsilon_high=0.28, max_completion_length=TC),
    tokens_per_micro_batch=100,
)
PROMPTS = Prompts(
    np.random.default_rng(0).integers(4, 32, (P, TP)).astype(np.int32),
    np.arange(TP) < np.random.default_rng(1).integers(1, TP + 1, P)[:, None],
)


@functools.cache
def programs(mesh: str = "auto", num_devices: int = 1, **options: Any) -> Programs:
    built = parse_mesh(mesh).build(jax.devices()[:num_devices])
    options = dataclasses.replace(OPTIONS, **options)
    return Programs(options, built, ChunkedLoss(token_tile=64), optax.sgd(32.0))


def model_on(mesh: jax.sharding.Mesh) -> Decoder:
    model = Decoder.init(CONFIG, jax.random.key(0), std=0.2)
    return jax.device_put(model, model.shardings(mesh))


@pytest.fixture(scope="module")
def rollout() -> Rollout:
    one = programs()
    made, _ = one.generate(model_on(one.mesh), PROMPTS, 0, num_generations=G)
    return jax.tree.map(np.asarray, made)


@pytest.fixture(scope="module")
def batch(rollout: Rollout) -> Batch:
    rng = np.random.default_rng(2)
    old = rng.normal(0, 0.3, (P, G, TC)).astype(np.float32)
    return Batch(rollout, rng.normal(size=(P, G)).astype(np.float32), rollout.sampler_logps + old)


def packed(runner: Programs, rollout: Rollout) -> Packing:
    lengths = np.asarray(rollout.completion_mask).sum(axis=-1)
    return runner.packing(np.asarray(rollout.prompts.mask).sum(axis=1), lengths)


def step_of(runner: Programs, batch: Batch) -> tuple[Decoder, dict[str, float]]:
    """The change of every parameter in one update, and its metrics."""
    model = model_on(runner.mesh)
    before = jax.tree.map(np.asarray, model)
    state, metrics = runner.update(runner.init(model), batch, packed(runner, batch.rollout))
    return jax.tree.map(lambda a, b: np.asarray(b) - a, before, state.model), metrics


@pytest.fixture(scope="module")
def whole_step(batch: Batch) -> tuple[Decoder, dict[str, float]]:
    return step_of(programs(), batch)


@pytest.mark.grid
@pytest.mark.parametrize(
    ("mesh", "num_devices", "options"),
    [
        ("2,2,2", 8, dict(micro_batch_size_per_device=4, remat="dots")),
        ("1,4,1", 4, {}),
        pytest.param("1,1,4", 4, dict(remat="full"), marks=pytest.mark.slow),
        pytest.param("auto", 1, dict(micro_batch_size_per_device=2), marks=pytest.mark.slow),
    ],
)
def test_micro_batches_and_devices_leave_the_update_unchanged(
    mesh: str,
    num_devices: int,
    options: dict[str, Any],
    batch: Batch,
    whole_step: tuple[Decoder, dict[str, float]],
) -> None:
    changes, metrics = step_of(programs(mesh, num_devices, **options), batch)
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
    rollout: Rollout, sharding: RolloutSharding, mesh: str, num_devices: int, num_prompts: int
) -> None:
    many = programs(mesh, num_devices, rollout_sharding=sharding)
    prompts = jax.tree.map(lambda x: x[:num_prompts], PROMPTS)
    other, _ = many.generate(model_on(many.mesh), prompts, 0, num_generations=G)
    np.testing.assert_array_equal(other.completion_ids, rollout.completion_ids[:num_prompts])
    logps = rollout.sampler_logps[:num_prompts]
    np.testing.assert_allclose(other.sampler_logps, logps, atol=1e-5)


def test_scores_equal_what_the_sampler_reported(rollout: Rollout) -> None:
    runner = programs("2,2,2", 8)
    scores = runner.score(model_on(runner.mesh), rollout, packed(runner, rollout))
    mask = rollout.completion_mask
    np.testing.assert_allclose(
        np.asarray(scores.logps)[mask], rollout.sampler_logps[mask], atol=1e-4
    )


def test_experts_have_no_adapters() -> None:
    model = model_on(programs().mesh)
    assert linear_names(model) == ["q_proj", "k_proj", "v_proj", "o_proj"]
    adapted = with_adapters(model, Lora(rank=2, alpha=4.0), jax.random.key(1))
    assert not any(jax.tree.leaves(adapted.trainable.layers.experts))
