"""The three programs: one step is one step, however its batch is cut and spread."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpo_eqx.errors import UserError
from grpo_eqx.generation import Rollout, Sampling
from grpo_eqx.loss_backends import ChunkedLoss
from grpo_eqx.micro_batches import Batch
from grpo_eqx.models.config import Qwen2Config
from grpo_eqx.models.qwen2 import Qwen2
from grpo_eqx.programs import ProgramOptions, Programs
from grpo_eqx.sharding import parse_mesh

CONFIG = Qwen2Config(
    vocab_size=32,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
P, G, TP, TC = 8, 4, 6, 10
OPTIONS = ProgramOptions(
    sampling=Sampling(temperature=0.7),
    max_completion_length=TC,
    eos_ids=(3,),
    pad_id=0,
    seed=0,
    dtype=jnp.dtype("float32"),
    remat="none",
    epsilon=0.2,
    epsilon_high=0.28,
    micro_batch_size_per_device=None,
)
PROMPT_IDS = np.random.default_rng(0).integers(4, 32, (P, TP)).astype(np.int32)
PROMPT_MASK = np.arange(TP) < np.random.default_rng(1).integers(1, TP + 1, P)[:, None]


def programs(mesh: str = "auto", num_devices: int = 1, micro: int | None = None) -> Programs:
    options = dataclasses.replace(OPTIONS, micro_batch_size_per_device=micro)
    built = parse_mesh(mesh).build(jax.devices()[:num_devices])
    # Plain descent at rate 1: the change of the parameters is the gradient itself.
    return Programs(options, built, ChunkedLoss(chunk_size=64), optax.sgd(1.0))


def model_on(mesh: jax.sharding.Mesh) -> Qwen2:
    model = Qwen2.init(CONFIG, jax.random.key(0), std=0.2)
    return jax.device_put(model, model.shardings(mesh))


@pytest.fixture(scope="module")
def rollout() -> Rollout:
    """Completions of different lengths, as numpy arrays."""
    one = programs()
    model = model_on(one.mesh)
    rollout = one.generate(model, PROMPT_IDS, PROMPT_MASK, 0, num_generations=G)
    lengths = np.asarray(rollout.lengths)
    assert lengths.min() < lengths.max()
    return jax.tree.map(np.asarray, rollout)


@pytest.fixture(scope="module")
def batch(rollout: Rollout) -> Batch:
    """The rollout with advantages, and old log-probs far enough off for some ratios to clip."""
    rng = np.random.default_rng(2)
    advantages = rng.normal(size=(P, G)).astype(np.float32)
    noise = rng.normal(0, 0.3, (P, G, TC)).astype(np.float32)
    return Batch(rollout, advantages, rollout.sampler_logps + noise)


@pytest.fixture(scope="module")
def whole_step(batch: Batch) -> tuple[list[np.ndarray], dict[str, float]]:
    return step_of(programs(), batch)


def step_of(runner: Programs, batch: Batch) -> tuple[list[np.ndarray], dict[str, float]]:
    """The change of every parameter in one update, and its metrics."""
    model = model_on(runner.mesh)
    before = [np.asarray(x) for x in jax.tree.leaves(model)]
    state, metrics = runner.update(runner.init(model), batch)
    after = [np.asarray(x) for x in jax.tree.leaves(state.model)]
    return [b - a for a, b in zip(before, after, strict=True)], jax.device_get(metrics)


@pytest.mark.parametrize(
    ("mesh", "num_devices", "micro"),
    [
        ("auto", 1, 16),  # two micro-batches of whole groups
        ("auto", 1, 8),  # four
        ("auto", 1, 2),  # sixteen, each half a group
        ("auto", 8, None),
        ("auto", 8, 2),
        ("2,2,2", 8, 4),
        ("1,4,1", 4, None),
    ],
)
def test_micro_batches_and_devices_leave_the_update_unchanged(
    mesh: str,
    num_devices: int,
    micro: int | None,
    batch: Batch,
    whole_step: tuple[list[np.ndarray], dict[str, float]],
) -> None:
    changes, metrics = step_of(programs(mesh, num_devices, micro), batch)
    expected, expected_metrics = whole_step
    size = max(np.abs(x).max() for x in expected)
    for change, reference in zip(changes, expected, strict=True):
        np.testing.assert_allclose(change, reference, atol=2e-6 * size, rtol=1e-4)
    for name, value in expected_metrics.items():
        np.testing.assert_allclose(metrics[name], value, rtol=2e-5, atol=2e-6, err_msg=name)


def test_the_loss_is_the_mean_over_all_tokens_of_the_clipped_objective(
    batch: Batch, whole_step: tuple[list[np.ndarray], dict[str, float]]
) -> None:
    """By hand in float64, from the trainer's own log-probs."""
    one = programs()
    logps = np.asarray(one.score(model_on(one.mesh), batch.rollout), np.float64)
    ratio = np.exp(logps - np.asarray(batch.old_logps, np.float64))
    advantage = batch.advantages[..., None].astype(np.float64)
    losses = -np.minimum(ratio * advantage, np.clip(ratio, 0.8, 1.28) * advantage)
    mask = batch.rollout.completion_mask
    metrics = whole_step[1]
    np.testing.assert_allclose(metrics["loss"], losses[mask].mean(), rtol=1e-4, atol=1e-6)
    clipped = ((ratio > 1.28) & (advantage > 0))[mask].mean()
    np.testing.assert_allclose(metrics["clip_ratio/high_mean"], clipped, rtol=1e-4)
    assert 0 < clipped < 1


def test_scores_equal_what_the_sampler_reported(rollout: Rollout) -> None:
    one = programs()
    scores = np.asarray(one.score(model_on(one.mesh), rollout))
    mask = rollout.completion_mask
    np.testing.assert_allclose(scores[mask], rollout.sampler_logps[mask], atol=1e-4)


def test_on_policy_updates_need_no_old_logps(batch: Batch) -> None:
    """Without them ratios are 1: nothing is clipped and the loss is minus the mean advantage."""
    _, metrics = step_of(programs(), Batch(batch.rollout, batch.advantages, None))
    mask = batch.rollout.completion_mask
    advantages = np.broadcast_to(batch.advantages[..., None], mask.shape)
    np.testing.assert_allclose(metrics["loss"], -advantages[mask].mean(), rtol=1e-4)
    assert metrics["clip_ratio/region_mean"] == 0
    assert metrics["sampling/sampling_logp_difference/max"] < 1e-4
    assert metrics["grad_norm"] > 0


def test_the_same_tokens_on_one_device_and_on_eight(rollout: Rollout) -> None:
    for mesh, count in (("auto", 8), ("2,2,2", 8)):
        many = programs(mesh, count)
        other = many.generate(model_on(many.mesh), PROMPT_IDS, PROMPT_MASK, 0, num_generations=G)
        assert (np.asarray(other.completion_ids) == rollout.completion_ids).all()


def test_a_batch_without_any_advantage_changes_nothing(batch: Batch) -> None:
    nothing = Batch(batch.rollout, np.zeros((P, G), np.float32), None)
    changes, metrics = step_of(programs(), nothing)
    assert all((change == 0).all() for change in changes)
    assert metrics["grad_norm"] == 0


def test_micro_batches_that_do_not_divide_are_refused_with_those_that_do(batch: Batch) -> None:
    with pytest.raises(
        UserError, match=r"is 3, and a device has 8 x 4 .* one of 1, 2, 4, 8, 16, 32"
    ):
        step_of(programs(micro=3), batch)


def test_parameters_and_moments_are_split_over_the_mesh() -> None:
    runner = programs("auto", 8)
    runner.optimizer = optax.adam(1e-3)
    state = runner.init(model_on(runner.mesh))
    moments = state.opt_state[0].mu
    for array in (state.model.layers.gate_proj.weight, moments.layers.gate_proj.weight):
        assert array.addressable_shards[0].data.size == array.size // 8


def test_bfloat16_arithmetic_lowers_for_accelerators_with_float32_gradients(batch: Batch) -> None:
    """A CPU cannot run it; tracing and lowering still check every dtype of the three programs."""
    options = dataclasses.replace(OPTIONS, dtype=jnp.dtype("bfloat16"), remat="full")
    mesh = parse_mesh("auto").build(jax.devices()[:1])
    runner = Programs(options, mesh, ChunkedLoss(chunk_size=64), optax.sgd(1.0))
    model = model_on(mesh)

    def program(model: Qwen2) -> tuple[Qwen2, jax.Array, jax.Array]:
        rollout = runner.generate(model, PROMPT_IDS, PROMPT_MASK, 0, num_generations=G)
        state, metrics = runner.update(runner.init(model), batch)
        return state.model, metrics["loss"], runner.score(model, rollout)

    lowered = jax.jit(program).trace(model).lower(lowering_platforms=("tpu",))
    assert "bf16" in lowered.as_text()
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(lowered.out_info))
