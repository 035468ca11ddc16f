"""The three programs: one step is one step, however its batch is cut and spread."""

import dataclasses
import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpo_eqx.common.errors import UserError
from grpo_eqx.generation import Prompts, Rollout, Sampling, Stopping
from grpo_eqx.generation.prompts import map_prompts_and_completions
from grpo_eqx.loss_backends import ChunkedLoss, DenseLoss, LossBackend, PallasLoss
from grpo_eqx.models.causal_attention import BlockedAttention
from grpo_eqx.models.families.qwen2 import Qwen2, Qwen2Config
from grpo_eqx.models.layers import Linear
from grpo_eqx.models.lora import Lora, with_adapters
from grpo_eqx.models.rounding import rounded_rows
from grpo_eqx.objective import Objective
from grpo_eqx.rollout.layout_choice import AutoSharding
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
from grpo_eqx.training.programs import Programs, TokenScores

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
CHUNKED = ChunkedLoss(token_tile=64)
PROMPT_IDS = np.random.default_rng(0).integers(4, 32, (P, TP)).astype(np.int32)
PROMPT_MASK = np.arange(TP) < np.random.default_rng(1).integers(1, TP + 1, P)[:, None]
PROMPTS = Prompts(PROMPT_IDS, PROMPT_MASK)


@functools.cache
def programs(
    mesh: str = "auto",
    num_devices: int = 1,
    micro: int | None = None,
    backend: LossBackend = CHUNKED,
    **options: Any,
) -> Programs:
    """Makes programs, once for equal options, so that tests share what is compiled."""
    options = dataclasses.replace(OPTIONS, micro_batch_size_per_device=micro, **options)
    built = parse_mesh(mesh).build(jax.devices()[:num_devices])
    # Plain descent: the change of the parameters is the gradient, up to the rate, which is high
    # enough for the rounding of the parameters not to hide it.
    return Programs(options, built, backend, optax.sgd(32.0))


def model_on(mesh: jax.sharding.Mesh, lora: Lora | None = None) -> Qwen2:
    model = Qwen2.init(CONFIG, jax.random.key(0), std=0.2)
    if lora is not None:
        model = with_adapters(model, lora, jax.random.key(1))
        rng = np.random.default_rng(4)  # as if they had learned something
        model = jax.tree.map(
            lambda x, is_adapter: (
                jnp.asarray(rng.normal(0, 0.1, x.shape), x.dtype) if is_adapter else x
            ),
            model,
            model.trainable,
        )
    return jax.device_put(model, model.shardings(mesh))


@pytest.fixture(scope="module")
def rollout() -> Rollout:
    """Completions of different lengths, as numpy arrays."""
    one = programs()
    model = model_on(one.mesh)
    rollout, _ = one.generate(model, PROMPTS, 0, num_generations=G)
    lengths = np.asarray(rollout.lengths)
    assert lengths.min() < lengths.max()
    return jax.tree.map(np.asarray, rollout)


@pytest.fixture(scope="module")
def batch(rollout: Rollout) -> Batch:
    """The rollout with advantages, and old log-probs far enough off for some ratios to clip."""
    rng = np.random.default_rng(2)
    advantages = rng.normal(size=(P, G)).astype(np.float32)
    old, ref = (rng.normal(0, 0.3, (P, G, TC)).astype(np.float32) for _ in range(2))
    entropies = rng.random((P, G, TC), np.float32)
    sampled = rollout.sampler_logps
    return Batch(rollout, advantages, sampled + old, sampled + ref, entropies)


@pytest.fixture(scope="module")
def whole_step(batch: Batch) -> tuple[list[np.ndarray], dict[str, float]]:
    return step_of(programs(), batch)


EVERYTHING = {
    "objective": Objective(
        loss_type="grpo",
        importance_sampling_level="sequence",
        epsilon=0.02,
        epsilon_high=0.03,
        beta=0.1,
        importance_sampling_mode="sequence_truncate",
        importance_sampling_clip_max=1.5,
        off_policy_mask_threshold=0.1,
        entropy_coef=0.01,
        max_completion_length=TC,
    ),
    "mask_truncated_completions": True,
    "top_entropy_quantile": 0.5,
}
"""Options under which every term and mask of the objective acts."""


@pytest.fixture(scope="module")
def whole_step_of_everything(batch: Batch) -> tuple[list[np.ndarray], dict[str, float]]:
    return step_of(programs(**EVERYTHING), batch)


def packed(runner: Programs, rollout: Rollout) -> Packing:
    """The rows of a rollout's own lengths."""
    prompt_lengths = np.asarray(rollout.prompts.mask).sum(axis=1)
    return runner.packing(prompt_lengths, np.asarray(rollout.completion_mask).sum(axis=-1))


def restored(model: Qwen2) -> Qwen2:
    """The model with the weights that its rounded ones stand for, on one device."""
    model = jax.device_put(model, jax.devices()[0])

    def round_trip(weight: jax.Array) -> jax.Array:
        values, scales = rounded_rows(weight)
        return values * scales[..., None]

    def is_linear(x: object) -> bool:
        return isinstance(x, Linear)

    layers = jax.tree.map(
        lambda x: Linear(round_trip(x.weight), x.bias) if isinstance(x, Linear) else x,
        model.layers,
        is_leaf=is_linear,
    )
    model = dataclasses.replace(model, layers=layers)
    return model.with_output_table(round_trip(model.head))


def score(runner: Programs, rollout: Rollout) -> TokenScores:
    return runner.score(model_on(runner.mesh), rollout, packed(runner, rollout))


def step_of(
    runner: Programs, batch: Batch, lora: Lora | None = None
) -> tuple[list[np.ndarray], dict[str, float]]:
    """The change of every trained parameter in one update, and its metrics."""
    model = model_on(runner.mesh, lora)
    before, frozen = eqx.partition(jax.tree.map(np.asarray, model), model.trainable)
    state, metrics = runner.update(runner.init(model), batch, packed(runner, batch.rollout))
    after, still = eqx.partition(jax.tree.map(np.asarray, state.model), model.trainable)
    assert eqx.tree_equal(frozen, still)
    before, after = jax.tree.leaves(before), jax.tree.leaves(after)
    return [b - a for a, b in zip(before, after, strict=True)], jax.device_get(metrics)


@pytest.mark.grid
@pytest.mark.parametrize(
    ("mesh", "num_devices", "micro"),
    [
        ("auto", 1, 16),  # several rows at a time
        pytest.param("auto", 1, 8, marks=pytest.mark.slow),
        pytest.param("auto", 1, 2, marks=pytest.mark.slow),  # rows with half a group
        pytest.param("auto", 8, None, marks=pytest.mark.slow),
        pytest.param("auto", 8, 2, marks=pytest.mark.slow),
        ("2,2,2", 8, 4),
        pytest.param("1,4,1", 4, None, marks=pytest.mark.slow),
    ],
)
def test_micro_batches_and_devices_leave_the_update_unchanged(
    mesh: str,
    num_devices: int,
    micro: int | None,
    batch: Batch,
    whole_step: tuple[list[np.ndarray], dict[str, float]],
) -> None:
    assert_same_step(step_of(programs(mesh, num_devices, micro), batch), whole_step)


LORA = Lora(rank=3, alpha=6.0)


@pytest.fixture(scope="module")
def whole_step_of_adapters(batch: Batch) -> tuple[list[np.ndarray], dict[str, float]]:
    return step_of(programs(), batch, LORA)


@pytest.mark.grid
@pytest.mark.parametrize(
    ("mesh", "num_devices", "micro"),
    [
        ("2,2,2", 8, 4),
        pytest.param("auto", 1, 8, marks=pytest.mark.slow),
        pytest.param("auto", 8, 2, marks=pytest.mark.slow),
    ],
)
def test_so_they_do_where_adapters_are_trained(
    mesh: str,
    num_devices: int,
    micro: int | None,
    batch: Batch,
    whole_step_of_adapters: tuple[list[np.ndarray], dict[str, float]],
) -> None:
    """Nothing else changes, which `step_of` checks."""
    runner = programs(mesh, num_devices, micro)
    assert_same_step(step_of(runner, batch, LORA), whole_step_of_adapters)


def test_the_sampler_merges_the_adapters_that_the_trainer_adds(rollout: Rollout) -> None:
    runner = programs("2,2,2", 8)
    model = model_on(runner.mesh, LORA)
    drawn, _ = runner.generate(model, PROMPTS, 0, num_generations=G)
    drawn = jax.tree.map(np.asarray, drawn)
    assert not np.array_equal(drawn.completion_ids, rollout.completion_ids)
    scores = runner.score(model, drawn, packed(runner, drawn))
    mask = drawn.completion_mask
    found = np.asarray(scores.logps)[mask]
    np.testing.assert_allclose(found, drawn.sampler_logps[mask], atol=1e-4)


def test_the_reference_of_adapters_is_the_model_beneath(rollout: Rollout) -> None:
    """It is the same arrays, and no second copy."""
    runner = programs()
    state = runner.init(model_on(runner.mesh, LORA))
    reference = state.reference_model
    assert reference is not None
    assert state.reference is None
    assert reference.layers.q_proj.weight is state.model.layers.q_proj.weight
    scores = runner.score(reference, rollout, packed(runner, rollout))
    np.testing.assert_array_equal(scores.logps, score(runner, rollout).logps)


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "num_devices", "micro"),
    [("auto", 1, 16), ("auto", 1, 2), ("auto", 8, 2), ("2,2,2", 8, 4)],
)
def test_so_they_do_with_every_term_and_mask_of_the_objective(
    mesh: str,
    num_devices: int,
    micro: int | None,
    batch: Batch,
    whole_step_of_everything: tuple[list[np.ndarray], dict[str, float]],
) -> None:
    runner = programs(mesh, num_devices, micro, **EVERYTHING)
    assert_same_step(step_of(runner, batch), whole_step_of_everything)


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize("backend", [DenseLoss(), PallasLoss()], ids=repr)
def test_and_so_does_the_loss_backend(
    backend: LossBackend,
    batch: Batch,
    whole_step_of_everything: tuple[list[np.ndarray], dict[str, float]],
) -> None:
    runner = programs("2,2,2", 8, 4, backend, **EVERYTHING)
    assert_same_step(step_of(runner, batch), whole_step_of_everything)


def test_what_a_loss_backend_refuses_it_refuses_before_the_first_step() -> None:
    runner = programs(backend=PallasLoss(token_block=100))
    with pytest.raises(UserError, match="token_block is 100"):
        runner.init(model_on(runner.mesh))


def assert_same_step(
    found: tuple[list[np.ndarray], dict[str, float]],
    wanted: tuple[list[np.ndarray], dict[str, float]],
) -> None:
    """Each tensor's change by its own norm: single entries can be sums that nearly cancel.

    Two orders of the same float32 sums differ by up to 5e-6 here, by the compiler's choice.
    """
    changes, metrics = found
    expected, expected_metrics = wanted
    for change, reference in zip(changes, expected, strict=True):
        assert np.linalg.norm(change - reference) < 1e-5 * np.linalg.norm(reference)
    for name, value in expected_metrics.items():
        np.testing.assert_allclose(metrics[name], value, rtol=2e-5, atol=2e-6, err_msg=name)


def test_the_loss_is_the_mean_over_all_tokens_of_the_clipped_objective(
    batch: Batch, whole_step: tuple[list[np.ndarray], dict[str, float]]
) -> None:
    """By hand in float64, from the trainer's own log-probs."""
    one = programs()
    logps = np.asarray(score(one, batch.rollout).logps, np.float64)
    ratio = np.exp(logps - np.asarray(batch.old_logps, np.float64))
    advantage = batch.advantages[..., None].astype(np.float64)
    losses = -np.minimum(ratio * advantage, np.clip(ratio, 0.8, 1.28) * advantage)
    mask = batch.rollout.completion_mask
    metrics = whole_step[1]
    np.testing.assert_allclose(metrics["loss"], losses[mask].mean(), rtol=1e-4, atol=1e-6)
    clipped = ((ratio > 1.28) & (advantage > 0))[mask].mean()
    np.testing.assert_allclose(metrics["clip_ratio/high_mean"], clipped, rtol=1e-4)
    assert 0 < clipped < 1


@pytest.mark.slow
def test_tokens_that_the_model_did_not_write_are_context_and_no_more(batch: Batch) -> None:
    """By hand in float64: they are read as before, and the loss is the mean over the others."""
    written = np.random.default_rng(7).random((P, G, TC)) < 0.6
    one, rollout = programs(), jax.tree.map(jnp.asarray, batch.rollout)
    mixed = dataclasses.replace(rollout, written=jnp.asarray(written))
    logps = np.asarray(score(one, rollout).logps)
    np.testing.assert_array_equal(score(one, mixed).logps, logps)
    ratio = np.exp(logps.astype(np.float64) - np.asarray(batch.old_logps, np.float64))
    advantage = batch.advantages[..., None].astype(np.float64)
    losses = -np.minimum(ratio * advantage, np.clip(ratio, 0.8, 1.28) * advantage)
    poisoned = jnp.where(written, rollout.sampler_logps, np.nan)
    mixed = dataclasses.replace(mixed, sampler_logps=poisoned)
    step = step_of(one, dataclasses.replace(batch, rollout=mixed))
    counted = np.asarray(mixed.loss_mask)
    assert (counted == np.asarray(rollout.completion_mask) & written).all()
    np.testing.assert_allclose(step[1]["loss"], losses[counted].mean(), rtol=1e-4, atol=1e-6)
    for mesh, num_devices, micro in (("auto", 1, 2), ("2,2,2", 8, None)):
        runner = programs(mesh, num_devices, micro)
        assert_same_step(step_of(runner, dataclasses.replace(batch, rollout=mixed)), step)


def test_scores_equal_what_the_sampler_reported(rollout: Rollout) -> None:
    one = programs()
    scores = np.asarray(score(one, rollout).logps)
    mask = rollout.completion_mask
    np.testing.assert_allclose(scores[mask], rollout.sampler_logps[mask], atol=1e-4)


@pytest.mark.grid
@pytest.mark.parametrize(("mesh", "num_devices", "micro"), [("auto", 1, 2), ("2,2,2", 8, 8)])
def test_scores_do_not_depend_on_micro_batches_and_devices(
    mesh: str, num_devices: int, micro: int, rollout: Rollout
) -> None:
    one, many = programs(), programs(mesh, num_devices, micro)
    expected = score(one, rollout)
    found = score(many, rollout)
    mask = rollout.completion_mask
    for name in ("logps", "entropies"):
        a, b = (np.asarray(getattr(scores, name))[mask] for scores in (found, expected))
        np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.parametrize(("mesh", "num_devices"), [("auto", 1), ("auto", 4)])
def test_shares_of_a_batch_are_its_prompts_by_stride(
    mesh: str, num_devices: int, batch: Batch
) -> None:
    runner = programs(mesh, num_devices)
    for index in range(2):
        share = runner.share(batch, index, 2)
        assert (np.asarray(share.advantages) == batch.advantages[index::2]).all()
        assert (np.asarray(share.rollout.prompts.ids) == PROMPT_IDS[index::2]).all()
        assert share.ref_logps.shape == (P // 2, G, TC)


def test_groups_are_replaced_by_those_of_another_rollout(rollout: Rollout) -> None:
    runner = programs("auto", 8)
    rollout = jax.tree.map(jnp.asarray, rollout)
    fresh = dataclasses.replace(rollout, completion_ids=rollout.completion_ids + 100)
    source = np.array([0, 1, P + 7, 3, 4, P + 2, 6, 7], np.int32)
    found = jax.tree.map(np.asarray, runner.replace_groups(rollout, fresh, source))
    both = np.concatenate([rollout.completion_ids, fresh.completion_ids])
    assert (found.completion_ids == both[source]).all()
    assert (found.prompts.ids == PROMPT_IDS[source % P]).all()


def test_a_batch_with_replaced_groups_updates_as_those_groups_do(
    batch: Batch, whole_step: tuple[list[np.ndarray], dict[str, float]]
) -> None:
    runner = programs()
    source = np.where(np.arange(P) % 2 == 0, np.arange(P), np.arange(P) + P).astype(np.int32)
    merged = runner.replace_groups(batch.rollout, batch.rollout, source)
    assert_same_step(step_of(runner, dataclasses.replace(batch, rollout=merged)), whole_step)


def with_lengths(batch: Batch, lengths: np.ndarray) -> Batch:
    rollout = jax.tree.map(jnp.asarray, batch.rollout)
    mask = jnp.asarray(np.arange(TC) < lengths[..., None])
    return dataclasses.replace(batch, rollout=dataclasses.replace(rollout, completion_mask=mask))


def alone(runner: Programs, batch: Batch) -> Packing:
    """Rows that hold one completion each."""
    shape = dataclasses.replace(runner.row_shape(P, G), most_micro_batches=P * G, places=1)
    lengths = np.asarray(batch.rollout.completion_mask).sum(axis=-1)
    return Packing.plan(np.asarray(batch.rollout.prompts.mask).sum(axis=1), lengths, shape)


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("mesh", "num_devices", "micro"),
    [("auto", 1, 2), ("auto", 1, None), ("2,2,2", 8, 2)],
)
def test_completions_that_share_rows_update_as_those_that_do_not(
    mesh: str, num_devices: int, micro: int | None, seed: int, batch: Batch
) -> None:
    """With every term of the objective; the first group has a row's length and an empty one."""
    lengths = np.random.default_rng(seed).integers(1, TC + 1, (P, G))
    lengths[0] = [TC, 0, 2, 1]
    batch, one = with_lengths(batch, lengths), programs(**EVERYTHING)
    model = model_on(one.mesh)
    before = [np.asarray(x) for x in jax.tree.leaves(model)]
    state, metrics = one.update(one.init(model), batch, alone(one, batch))
    after = [np.asarray(x) for x in jax.tree.leaves(state.model)]
    changes = [b - a for a, b in zip(before, after, strict=True)]
    runner = programs(mesh, num_devices, micro, **EVERYTHING)
    assert_same_step(step_of(runner, batch), (changes, jax.device_get(metrics)))


def test_lengths_are_no_part_of_the_programs(batch: Batch) -> None:
    """One `update` and one `score` serve all of them."""
    runner = Programs(OPTIONS, programs().mesh, CHUNKED, optax.sgd(1.0))
    for longest in (1, 3, TC):
        lengths = np.random.default_rng(longest).integers(1, longest + 1, (P, G))
        ragged = with_lengths(batch, lengths)
        score(runner, ragged.rollout)
        step_of(runner, ragged)
    assert runner.num_shapes == {"score": 1, "update": 1}


def test_each_device_keeps_its_slots() -> None:
    """And no keys or values leave it."""
    slots = 16
    text = compiled_generate(programs("auto", 8, max_num_seqs=slots), P)
    L, K, D = CONFIG.num_hidden_layers, CONFIG.num_key_value_heads, CONFIG.head_size
    assert f"f32[{L},{slots // 8},1,{K},{TC},{D}]" in text
    assert f"f32[{L},{slots},1,{K}," not in text


def test_a_reference_model_lives_on_when_the_model_is_donated() -> None:
    runner = programs("auto", 8)
    model = model_on(runner.mesh)
    weights = np.asarray(model.layers.gate_proj.weight)
    reference = runner.reference(model, frozen=False)
    for leaf in jax.tree.leaves(model):
        leaf.delete()
    other = model_on(runner.mesh)
    other = jax.tree.map(lambda x: x + 1, other)
    mixed = runner.mix_reference(reference, other, 0.25)
    expected = 0.25 * (weights + 1) + 0.75 * weights
    np.testing.assert_allclose(mixed.layers.gate_proj.weight, expected, atol=1e-6)
    sharding = other.layers.gate_proj.weight.sharding
    assert mixed.layers.gate_proj.weight.sharding.is_equivalent_to(sharding, 3)


def test_a_frozen_reference_is_kept_in_the_dtype_it_is_computed_in() -> None:
    runner = programs(dtype=jnp.dtype("bfloat16"))
    reference = runner.reference(model_on(runner.mesh), frozen=True)
    assert reference.layers.gate_proj.weight.dtype == jnp.bfloat16
    assert reference.embed_tokens.dtype == jnp.float32


def test_a_reference_that_moves_follows_changes_far_below_the_compute_dtype() -> None:
    runner = programs(dtype=jnp.dtype("bfloat16"))
    model = model_on(runner.mesh)
    policy = jax.tree.map(lambda x: x * (1 + 1e-4), model)
    reference = runner.reference(model, frozen=False)
    for _ in range(50):
        reference = runner.mix_reference(reference, policy, 0.1)
    moved, there = (x.layers.gate_proj.weight for x in (reference, policy))
    np.testing.assert_allclose(moved, there, rtol=5e-6)


def test_truncated_completions_can_be_left_out(batch: Batch) -> None:
    """Their advantages then have no part in the update."""
    finished = batch.rollout.finished
    assert 0 < finished.sum() < finished.size
    runner = programs(mask_truncated_completions=True)
    changed = np.where(finished, batch.advantages, 100.0).astype(np.float32)
    assert_same_step(
        step_of(runner, dataclasses.replace(batch, advantages=changed)), step_of(runner, batch)
    )


@pytest.mark.grid
@pytest.mark.parametrize(("mesh", "num_devices"), [("auto", 1), ("2,2,2", 8)])
def test_dropped_completions_are_as_if_they_were_not_there(
    mesh: str, num_devices: int, batch: Batch
) -> None:
    """Their tokens count neither in the loss nor in what it is divided by."""
    runner = programs(mesh, num_devices)
    dropped = np.broadcast_to(np.arange(G) == 1, (P, G))
    whole = jax.tree.map(jnp.asarray, batch.rollout)
    left = dataclasses.replace(batch, rollout=runner.without_dropped(whole, dropped))
    without = map_prompts_and_completions(lambda x: x, lambda x: x[:, [0, 2, 3]], batch)
    assert_same_step(step_of(runner, left), step_of(programs(), without))


def test_only_tokens_of_high_entropy_learn(batch: Batch) -> None:
    mask = batch.rollout.completion_mask
    floor = np.quantile(batch.entropies[mask], 0.75)
    _, metrics = step_of(programs(top_entropy_quantile=0.25), batch)
    assert metrics["effective_batch/tokens"] == (batch.entropies[mask] >= floor).sum()
    np.testing.assert_allclose(metrics["effective_batch/tokens"] / mask.sum(), 0.25, atol=0.02)


def test_on_policy_updates_need_no_old_logps(batch: Batch) -> None:
    """Without them ratios are 1: nothing is clipped and the loss is minus the mean advantage."""
    _, metrics = step_of(programs(), Batch(batch.rollout, batch.advantages))
    mask = batch.rollout.completion_mask
    advantages = np.broadcast_to(batch.advantages[..., None], mask.shape)
    np.testing.assert_allclose(metrics["loss"], -advantages[mask].mean(), rtol=1e-4)
    assert metrics["clip_ratio/region_mean"] == 0
    assert metrics["sampling/sampling_logp_difference/max"] < 1e-4
    assert metrics["grad_norm"] > 0


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize(
    "sharding",
    [
        LegacySharding(), MaxTextSharding(), AutoSharding(), ReplicatedSharding(),
        TensorSharding(2), TensorSharding(4), TensorSharding(8),
    ],
    ids=repr,
)  # fmt: skip
@pytest.mark.parametrize(
    ("mesh", "num_devices", "num_prompts"),
    [
        ("auto", 8, P),
        ("2,2,2", 8, P),
        ("1,1,2", 2, P),
        pytest.param("2,2,2", 8, 2, marks=pytest.mark.long),
        pytest.param("1,1,4", 4, P, marks=pytest.mark.long),
    ],
)
def test_the_same_tokens_on_one_device_and_on_many(
    rollout: Rollout, sharding: RolloutSharding, mesh: str, num_devices: int, num_prompts: int
) -> None:
    """Prompts that divide or not, heads of keys (2) that do or not, groups along any axis."""
    if isinstance(sharding, TensorSharding) and sharding.size > num_devices:
        pytest.skip("a group has more devices")
    many = programs(mesh, num_devices, rollout_sharding=sharding)
    prompts = jax.tree.map(lambda x: x[:num_prompts], PROMPTS)
    other, _ = many.generate(model_on(many.mesh), prompts, 0, num_generations=G)
    np.testing.assert_array_equal(other.completion_ids, rollout.completion_ids[:num_prompts])
    logps = np.asarray(rollout.sampler_logps[:num_prompts])
    np.testing.assert_allclose(other.sampler_logps, logps, atol=1e-5)


@pytest.mark.grid
@pytest.mark.parametrize("tied", [True, False])
def test_int8_weights_give_the_same_tokens_on_one_device_and_on_many(tied: bool) -> None:
    """They are rounded alike, whichever part of a row a device holds; log-probs are theirs."""
    config = dataclasses.replace(CONFIG, tie_word_embeddings=tied)
    made = []
    for sharding, num_devices in [(LegacySharding(), 1), (TensorSharding(2), 8)]:
        runner = programs(
            "auto", num_devices, rollout_sharding=sharding, rollout_dtype=jnp.dtype("int8")
        )
        model = Qwen2.init(config, jax.random.key(0), std=0.2)
        model = jax.device_put(model, model.shardings(runner.mesh))
        made.append(runner.generate(model, PROMPTS, 0, num_generations=G)[0])
    np.testing.assert_array_equal(made[1].completion_ids, made[0].completion_ids)
    np.testing.assert_allclose(made[1].sampler_logps, made[0].sampler_logps, atol=1e-5)
    one, mask = programs(), np.asarray(made[0].completion_mask)
    scores = one.score(restored(model), made[0], packed(one, made[0])).logps
    np.testing.assert_allclose(made[0].sampler_logps[mask], np.asarray(scores)[mask], atol=1e-4)


@pytest.mark.grid
@pytest.mark.parametrize(
    ("sharding", "mesh", "num_prompts", "local"),
    [
        (LegacySharding(), "2,2,2", P, (P // 8, G, 2)),
        (LegacySharding(), "2,4,1", 2, (1, G // 4, 2)),
        (MaxTextSharding(), "2,4,1", P, (P // 2, G, 2)),
        (MaxTextSharding(), "2,2,2", P, (P // 2, G, 1)),
        (ReplicatedSharding(), "2,2,2", P, (P // 8, G, 2)),
        (TensorSharding(2), "auto", P, (P // 4, G, 1)),
        (TensorSharding(4), "2,2,2", P, (P // 2, G, 1)),  # two devices hold each head of keys
    ],
)
def test_a_device_has_the_cache_of_its_own_completions(
    sharding: RolloutSharding, mesh: str, num_prompts: int, local: tuple[int, int, int]
) -> None:
    """Prompts, completions of each, and heads, as the strategy splits them."""
    text = compiled_generate(programs(mesh, 8, rollout_sharding=sharding), num_prompts)
    L, K, D = CONFIG.num_hidden_layers, CONFIG.num_key_value_heads, CONFIG.head_size
    prompts, group, heads = local
    assert f"f32[{L},{prompts},{group},{heads},{TC},{D}]" in text
    assert f"f32[{L},{num_prompts},{G},{K},{TC},{D}]" not in text


def compiled_generate(runner: Programs, num_prompts: int) -> str:
    @jax.jit
    def generate(model: Qwen2) -> Rollout:
        prompts = jax.tree.map(lambda x: x[:num_prompts], PROMPTS)
        return runner.generate(model, prompts, 0, num_generations=G)[0]

    return generate.lower(model_on(runner.mesh)).compile().as_text()


def test_a_batch_without_any_advantage_changes_nothing(batch: Batch) -> None:
    nothing = Batch(batch.rollout, np.zeros((P, G), np.float32))
    changes, metrics = step_of(programs(), nothing)
    assert all((change == 0).all() for change in changes)
    assert metrics["grad_norm"] == 0


@pytest.mark.grid
@pytest.mark.parametrize(("mesh", "num_devices"), [("auto", 1), ("2,2,2", 8)])
def test_an_update_that_is_not_finite_is_skipped(mesh: str, num_devices: int, batch: Batch) -> None:
    """Parameters and moments stay as they are; the next update counts on from them."""
    built = parse_mesh(mesh).build(jax.devices()[:num_devices])
    runner = Programs(OPTIONS, built, CHUNKED, optax.adam(1e-3))
    packing = packed(runner, batch.rollout)
    state, metrics = runner.update(runner.init(model_on(built)), batch, packing)
    assert metrics["skipped_updates"] == 0
    before = jax.tree.map(np.asarray, (state.model, state.opt_state))
    advantages = batch.advantages.copy()
    advantages[2, 1] = np.inf
    poisoned = dataclasses.replace(batch, advantages=advantages)
    state, metrics = runner.update(state, poisoned, packing)
    assert metrics["skipped_updates"] == 1
    jax.tree.map(np.testing.assert_array_equal, (state.model, state.opt_state), before)


def test_parameters_and_moments_are_split_over_the_mesh() -> None:
    mesh = parse_mesh("auto").build(jax.devices())
    runner = Programs(OPTIONS, mesh, CHUNKED, optax.adam(1e-3))
    state = runner.init(model_on(runner.mesh))
    moments = state.opt_state[0].mu
    for array in (state.model.layers.gate_proj.weight, moments.layers.gate_proj.weight):
        assert array.addressable_shards[0].data.size == array.size // 8


def test_bfloat16_arithmetic_lowers_for_accelerators_with_float32_gradients(batch: Batch) -> None:
    """A CPU cannot run it; tracing and lowering still check every dtype of the three programs."""
    options = dataclasses.replace(OPTIONS, dtype=jnp.dtype("bfloat16"), remat="full")
    mesh = parse_mesh("auto").build(jax.devices()[:1])
    runner = Programs(options, mesh, ChunkedLoss(token_tile=64), optax.sgd(32.0))
    model, packing = model_on(mesh), packed(runner, batch.rollout)

    def program(model: Qwen2) -> tuple[Qwen2, jax.Array, jax.Array]:
        rollout, _ = runner.generate(model, PROMPTS, 0, num_generations=G)
        state, metrics = runner.update(runner.init(model), batch, packing)
        return state.model, metrics["loss"], runner.score(model, rollout, packing).logps

    lowered = jax.jit(program).trace(model).lower(lowering_platforms=("tpu",))
    assert "bf16" in lowered.as_text()
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(lowered.out_info))


@pytest.mark.parametrize(
    ("dtype", "multiple", "stored"),
    [("bfloat16", 1, 64 * 2), ("bfloat16", 128, 128 * 2), ("int8", 128, 128 + 4)],
)
def test_bytes_of_a_cache_include_zeros_and_scales(dtype: str, multiple: int, stored: int) -> None:
    options = dataclasses.replace(
        OPTIONS, kv_cache_dtype=jnp.dtype(dtype), kv_head_multiple=multiple
    )
    assert 64 * options.kv_itemsize(64) == stored
