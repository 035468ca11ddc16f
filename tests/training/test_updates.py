"""Sampling, scores and updates: one step is one step, however its batch is cut and spread."""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpo_eqx.common.errors import UserError
from grpo_eqx.loss_backends import DenseLoss, LossBackend, PallasLoss
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
)
from grpo_eqx.training import Packing, TokenScores
from grpo_eqx.training.reference import copied, mixed

from .runner import Batch, Runner, Sample, make_runner, sample_of

CONFIG = Qwen2Config(
    vocab_size=32,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
P, G, TP, TC = 8, 4, 6, 10
PROMPT_IDS = np.random.default_rng(0).integers(4, 32, (P, TP)).astype(np.int32)
PROMPTS = [
    ids[:length].tolist()
    for ids, length in zip(PROMPT_IDS, np.random.default_rng(1).integers(1, TP + 1, P), strict=True)
]


runner_on = functools.cache(functools.partial(make_runner, CONFIG.vocab_size, TP, TC))
"""Makes a runner, once for equal options, so that tests share what is compiled."""


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
def rollout() -> Sample:
    """Completions of different lengths."""
    one = runner_on()
    rollout = one.sample(model_on(one.mesh), PROMPTS, G)
    assert rollout.lengths.min() < rollout.lengths.max()
    return rollout


@pytest.fixture(scope="module")
def batch(rollout: Sample) -> Batch:
    """The rollout with advantages, and old log-probs far enough off for some ratios to clip."""
    rng = np.random.default_rng(2)
    advantages = rng.normal(size=(P, G)).astype(np.float32)
    old, ref = (rng.normal(0, 0.3, (P, G, TC)).astype(np.float32) for _ in range(2))
    entropies = rng.random((P, G, TC), np.float32)
    sampled = rollout.logps
    return Batch(rollout, advantages, sampled + old, sampled + ref, entropies)


@pytest.fixture(scope="module")
def whole_step(batch: Batch) -> tuple[list[np.ndarray], dict[str, float]]:
    return step_of(runner_on(), batch)


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
    "top_entropy_quantile": 0.5,
}
"""Options under which every term and mask of the objective acts."""


@pytest.fixture(scope="module")
def whole_step_of_everything(batch: Batch) -> tuple[list[np.ndarray], dict[str, float]]:
    return step_of(runner_on(**EVERYTHING), batch)


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


def score(runner: Runner, rollout: Sample) -> TokenScores:
    return runner.score(model_on(runner.mesh), rollout)


def step_of(
    runner: Runner, batch: Batch, lora: Lora | None = None
) -> tuple[list[np.ndarray], dict[str, float]]:
    """The change of every trained parameter in one update, and its metrics."""
    model = model_on(runner.mesh, lora)
    before, frozen = eqx.partition(jax.tree.map(np.asarray, model), model.trainable)
    state, metrics = runner.update(runner.updater.init(model), batch)
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
    assert_same_step(step_of(runner_on(mesh, num_devices, micro=micro), batch), whole_step)


LORA = Lora(rank=3, alpha=6.0)


@pytest.fixture(scope="module")
def whole_step_of_adapters(batch: Batch) -> tuple[list[np.ndarray], dict[str, float]]:
    return step_of(runner_on(), batch, LORA)


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
    runner = runner_on(mesh, num_devices, micro=micro)
    assert_same_step(step_of(runner, batch, LORA), whole_step_of_adapters)


def test_the_sampler_merges_the_adapters_that_the_trainer_adds(rollout: Sample) -> None:
    runner = runner_on("2,2,2", 8)
    model = model_on(runner.mesh, LORA)
    drawn = runner.sample(model, PROMPTS, G)
    assert not np.array_equal(drawn.ids, rollout.ids)
    found = runner.score(model, drawn).logps
    np.testing.assert_allclose(found[drawn.mask], drawn.logps[drawn.mask], atol=1e-4)


def test_the_reference_of_adapters_is_the_model_beneath(rollout: Sample) -> None:
    """It is the same arrays, and no second copy."""
    runner = runner_on()
    state = runner.updater.init(model_on(runner.mesh, LORA))
    reference = state.reference_model
    assert reference is not None
    assert state.reference is None
    assert reference.layers.q_proj.weight is state.model.layers.q_proj.weight
    scores = runner.score(reference, rollout)
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
    runner = runner_on(mesh, num_devices, micro=micro, **EVERYTHING)
    assert_same_step(step_of(runner, batch), whole_step_of_everything)


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize("backend", [DenseLoss(), PallasLoss()], ids=repr)
def test_and_so_does_the_loss_backend(
    backend: LossBackend,
    batch: Batch,
    whole_step_of_everything: tuple[list[np.ndarray], dict[str, float]],
) -> None:
    runner = runner_on("2,2,2", 8, backend, micro=4, **EVERYTHING)
    assert_same_step(step_of(runner, batch), whole_step_of_everything)


def test_what_a_loss_backend_refuses_it_refuses_before_the_first_step() -> None:
    runner = runner_on(backend=PallasLoss(token_block=100))
    with pytest.raises(UserError, match="token_block is 100"):
        runner.updater.init(model_on(runner.mesh))


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
    one = runner_on()
    logps = np.asarray(score(one, batch.sample).logps, np.float64)
    ratio = np.exp(logps - np.asarray(batch.old_logps, np.float64))
    advantage = batch.advantages[..., None].astype(np.float64)
    losses = -np.minimum(ratio * advantage, np.clip(ratio, 0.8, 1.28) * advantage)
    mask = batch.sample.mask
    metrics = whole_step[1]
    np.testing.assert_allclose(metrics["loss"], losses[mask].mean(), rtol=1e-4, atol=1e-6)
    clipped = ((ratio > 1.28) & (advantage > 0))[mask].mean()
    np.testing.assert_allclose(metrics["clip_ratio/high_mean"], clipped, rtol=1e-4)
    assert 0 < clipped < 1


@pytest.mark.slow
def test_tokens_that_the_model_did_not_write_are_context_and_no_more(batch: Batch) -> None:
    """By hand in float64: they are read as before, and the loss is the mean over the others."""
    written = np.random.default_rng(7).random((P, G, TC)) < 0.6
    one, sample = runner_on(), batch.sample
    logps = score(one, sample).logps
    ratio = np.exp(logps.astype(np.float64) - np.asarray(batch.old_logps, np.float64))
    advantage = batch.advantages[..., None].astype(np.float64)
    losses = -np.minimum(ratio * advantage, np.clip(ratio, 0.8, 1.28) * advantage)
    poisoned = np.where(written, sample.logps, np.nan)
    mixed_in = sample_of(PROMPTS, sample.ids, sample.lengths, poisoned, sample.finished)
    mixed = dataclasses.replace(batch, sample=mixed_in, counted=written)
    step = step_of(one, mixed)
    counted = sample.mask & written
    np.testing.assert_allclose(step[1]["loss"], losses[counted].mean(), rtol=1e-4, atol=1e-6)
    for mesh, num_devices, micro in (("auto", 1, 2), ("2,2,2", 8, None)):
        assert_same_step(step_of(runner_on(mesh, num_devices, micro=micro), mixed), step)


def test_scores_equal_what_the_sampler_reported(rollout: Sample) -> None:
    one = runner_on()
    scores = np.asarray(score(one, rollout).logps)
    mask = rollout.mask
    np.testing.assert_allclose(scores[mask], rollout.logps[mask], atol=1e-4)


@pytest.mark.grid
@pytest.mark.parametrize(("mesh", "num_devices", "micro"), [("auto", 1, 2), ("2,2,2", 8, 8)])
def test_scores_do_not_depend_on_micro_batches_and_devices(
    mesh: str, num_devices: int, micro: int, rollout: Sample
) -> None:
    one, many = runner_on(), runner_on(mesh, num_devices, micro=micro)
    expected = score(one, rollout)
    found = score(many, rollout)
    mask = rollout.mask
    for name in ("logps", "entropies"):
        a, b = (np.asarray(getattr(scores, name))[mask] for scores in (found, expected))
        np.testing.assert_allclose(a, b, atol=2e-5)


def with_lengths(batch: Batch, lengths: np.ndarray) -> Batch:
    return dataclasses.replace(batch, sample=batch.sample.with_lengths(lengths))


def alone(runner: Runner, sample: Sample) -> Packing:
    """Rows that hold one completion each."""
    shape = dataclasses.replace(runner.shape(P, G), most_micro_batches=P * G, places=1)
    return Packing.plan(np.array([len(ids) for ids in PROMPTS]), sample.lengths, shape)


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
    batch, one = with_lengths(batch, lengths), runner_on(**EVERYTHING)
    model = model_on(one.mesh)
    before = [np.asarray(x) for x in jax.tree.leaves(model)]
    state, metrics = one.update(one.updater.init(model), batch, alone(one, batch.sample))
    after = [np.asarray(x) for x in jax.tree.leaves(state.model)]
    changes = [b - a for a, b in zip(before, after, strict=True)]
    runner = runner_on(mesh, num_devices, micro=micro, **EVERYTHING)
    assert_same_step(step_of(runner, batch), (changes, jax.device_get(metrics)))


def test_lengths_are_no_part_of_the_programs(batch: Batch) -> None:
    """One `update` and one `score` serve all of them."""
    runner = make_runner(CONFIG.vocab_size, TP, TC)
    for longest in (1, 3, TC):
        lengths = np.random.default_rng(longest).integers(1, longest + 1, (P, G))
        ragged = with_lengths(batch, lengths)
        score(runner, ragged.sample)
        step_of(runner, ragged)
    assert runner.compiler.num_shapes == {"score": 1, "update": 1}


def test_each_device_keeps_its_slots() -> None:
    """And no keys or values leave it."""
    slots = 16
    text = compiled_generate(runner_on("auto", 8, max_num_seqs=slots), P)
    L, K, D = CONFIG.num_hidden_layers, CONFIG.num_key_value_heads, CONFIG.head_size
    assert f"f32[{L},{slots // 8},1,{K},{TC},{D}]" in text
    assert f"f32[{L},{slots},1,{K}," not in text


def test_a_reference_model_lives_on_when_the_model_is_donated() -> None:
    runner = runner_on("auto", 8)
    model = model_on(runner.mesh)
    weights = np.asarray(model.layers.gate_proj.weight)
    reference = copied(model, None, runner.mesh)
    for leaf in jax.tree.leaves(model):
        leaf.delete()
    other = model_on(runner.mesh)
    other = jax.tree.map(lambda x: x + 1, other)
    moved = mixed(reference, other, jnp.float32(0.25), runner.mesh)
    expected = 0.25 * (weights + 1) + 0.75 * weights
    np.testing.assert_allclose(moved.layers.gate_proj.weight, expected, atol=1e-6)
    sharding = other.layers.gate_proj.weight.sharding
    assert moved.layers.gate_proj.weight.sharding.is_equivalent_to(sharding, 3)


def test_a_frozen_reference_is_kept_in_the_dtype_it_is_computed_in() -> None:
    runner = runner_on()
    reference = copied(model_on(runner.mesh), jnp.dtype("bfloat16"), runner.mesh)
    assert reference.layers.gate_proj.weight.dtype == jnp.bfloat16
    assert reference.embed_tokens.dtype == jnp.float32


def test_a_reference_that_moves_follows_changes_far_below_the_compute_dtype() -> None:
    runner = runner_on()
    model = model_on(runner.mesh)
    policy = jax.tree.map(lambda x: x * (1 + 1e-4), model)
    reference = copied(model, None, runner.mesh)
    for _ in range(50):
        reference = mixed(reference, policy, jnp.float32(0.1), runner.mesh)
    moved, there = (x.layers.gate_proj.weight for x in (reference, policy))
    np.testing.assert_allclose(moved, there, rtol=5e-6)


@pytest.mark.grid
@pytest.mark.parametrize(("mesh", "num_devices"), [("auto", 1), ("2,2,2", 8)])
def test_completions_that_do_not_count_are_as_if_they_were_not_there(
    mesh: str, num_devices: int, batch: Batch
) -> None:
    """Their tokens count neither in the loss nor in what it is divided by."""
    left_out = np.broadcast_to(np.arange(G) != 1, (P, G))[..., None]
    left = dataclasses.replace(batch, counted=np.broadcast_to(left_out, batch.sample.mask.shape))
    others = [0, 2, 3]
    without = Batch(
        batch.sample.picked(samples=others), batch.advantages[:, others],
        *(None if x is None else x[:, others] for x in (batch.old_logps, batch.ref_logps)),
    )  # fmt: skip
    found = step_of(runner_on(mesh, num_devices), left)
    assert_same_step(found, step_of(runner_on(), without))


def test_only_tokens_of_high_entropy_learn(batch: Batch) -> None:
    mask = batch.sample.mask
    floor = np.quantile(batch.entropies[mask], 0.75)
    _, metrics = step_of(runner_on(top_entropy_quantile=0.25), batch)
    assert metrics["effective_batch/tokens"] == (batch.entropies[mask] >= floor).sum()
    np.testing.assert_allclose(metrics["effective_batch/tokens"] / mask.sum(), 0.25, atol=0.02)


def test_on_policy_updates_need_no_old_logps(batch: Batch) -> None:
    """Without them ratios are 1: nothing is clipped and the loss is minus the mean advantage."""
    _, metrics = step_of(runner_on(), Batch(batch.sample, batch.advantages))
    mask = batch.sample.mask
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
    rollout: Sample, sharding: RolloutSharding, mesh: str, num_devices: int, num_prompts: int
) -> None:
    """Prompts that divide or not, heads of keys (2) that do or not, groups along any axis."""
    if isinstance(sharding, TensorSharding) and sharding.size > num_devices:
        pytest.skip("a group has more devices")
    many = runner_on(mesh, num_devices, rollout_sharding=sharding)
    other = many.sample(model_on(many.mesh), PROMPTS[:num_prompts], G)
    expected = rollout.picked(slice(num_prompts))
    np.testing.assert_array_equal(other.ids, expected.ids)
    np.testing.assert_allclose(other.logps, expected.logps, atol=1e-5)


@pytest.mark.grid
@pytest.mark.parametrize("tied", [True, False])
def test_int8_weights_give_the_same_tokens_on_one_device_and_on_many(tied: bool) -> None:
    """They are rounded alike, whichever part of a row a device holds; log-probs are theirs."""
    config = dataclasses.replace(CONFIG, tie_word_embeddings=tied)
    made = []
    for sharding, num_devices in [(LegacySharding(), 1), (TensorSharding(2), 8)]:
        runner = runner_on(
            "auto", num_devices, rollout_sharding=sharding, rollout_dtype=jnp.dtype("int8")
        )
        model = Qwen2.init(config, jax.random.key(0), std=0.2)
        model = jax.device_put(model, model.shardings(runner.mesh))
        made.append(runner.sample(model, PROMPTS, G))
    np.testing.assert_array_equal(made[1].ids, made[0].ids)
    np.testing.assert_allclose(made[1].logps, made[0].logps, atol=1e-5)
    one, mask = runner_on(), made[0].mask
    scores = one.score(restored(model), made[0]).logps
    np.testing.assert_allclose(made[0].logps[mask], scores[mask], atol=1e-4)


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
    text = compiled_generate(runner_on(mesh, 8, rollout_sharding=sharding), num_prompts)
    L, K, D = CONFIG.num_hidden_layers, CONFIG.num_key_value_heads, CONFIG.head_size
    prompts, group, heads = local
    assert f"f32[{L},{prompts},{group},{heads},{TC},{D}]" in text
    assert f"f32[{L},{num_prompts},{G},{K},{TC},{D}]" not in text


def compiled_generate(runner: Runner, num_prompts: int) -> str:
    model = model_on(runner.mesh)
    return runner.sampler.lower(model, num_prompts, G, TP).compile().as_text()


def test_a_batch_without_any_advantage_changes_nothing(batch: Batch) -> None:
    nothing = Batch(batch.sample, np.zeros((P, G), np.float32))
    changes, metrics = step_of(runner_on(), nothing)
    assert all((change == 0).all() for change in changes)
    assert metrics["grad_norm"] == 0


@pytest.mark.grid
@pytest.mark.parametrize(("mesh", "num_devices"), [("auto", 1), ("2,2,2", 8)])
def test_an_update_that_is_not_finite_is_skipped(mesh: str, num_devices: int, batch: Batch) -> None:
    """Parameters and moments stay as they are; the next update counts on from them."""
    runner = make_runner(CONFIG.vocab_size, TP, TC, mesh, num_devices, optimizer=optax.adam(1e-3))
    state, metrics = runner.update(runner.updater.init(model_on(runner.mesh)), batch)
    assert metrics["skipped_updates"] == 0
    before = jax.tree.map(np.asarray, (state.model, state.opt_state))
    advantages = batch.advantages.copy()
    advantages[2, 1] = np.inf
    poisoned = dataclasses.replace(batch, advantages=advantages)
    state, metrics = runner.update(state, poisoned)
    assert metrics["skipped_updates"] == 1
    jax.tree.map(np.testing.assert_array_equal, (state.model, state.opt_state), before)


def test_so_is_one_that_only_the_optimizer_makes_not_finite(batch: Batch) -> None:
    """Loss and gradient are finite here."""
    overflow = optax.stateless(lambda updates, _: jax.tree.map(lambda x: x * jnp.inf, updates))
    runner = make_runner(CONFIG.vocab_size, TP, TC, optimizer=overflow)
    model = model_on(runner.mesh)
    before = jax.tree.map(np.asarray, model)
    state, metrics = runner.update(runner.updater.init(model), batch)
    assert np.isfinite(metrics["loss"])
    assert np.isfinite(metrics["grad_norm"])
    assert metrics["skipped_updates"] == 1
    jax.tree.map(np.testing.assert_array_equal, state.model, before)


def test_parameters_and_moments_are_split_over_the_mesh() -> None:
    runner = make_runner(CONFIG.vocab_size, TP, TC, "auto", 8, optimizer=optax.adam(1e-3))
    state = runner.updater.init(model_on(runner.mesh))
    moments = state.opt_state[0].mu
    for array in (state.model.layers.gate_proj.weight, moments.layers.gate_proj.weight):
        assert array.addressable_shards[0].data.size == array.size // 8


@pytest.mark.grid
@pytest.mark.parametrize(("mesh", "num_shards"), [("auto", 8), ("2,2,2", 4), ("1,1,8", 1)])
def test_a_device_has_its_own_rows_of_a_batch_and_no_others(
    mesh: str, num_shards: int, batch: Batch
) -> None:
    rows = runner_on(mesh, 8, micro=2).rows_of(batch)
    arrays = [x for x in jax.tree.leaves(rows) if x.ndim > 1]
    assert len(arrays) == 16
    for array in arrays:
        (size,) = {shard.data.nbytes for shard in array.addressable_shards}
        assert size == array.nbytes // num_shards


def test_bfloat16_arithmetic_lowers_for_accelerators_with_float32_gradients() -> None:
    """A CPU cannot run it; tracing and lowering still check every dtype of the programs."""
    runner = runner_on(dtype=jnp.dtype("bfloat16"), remat="full")
    model = model_on(runner.mesh)
    lowered = [
        runner.lower_update(model, P, G), runner.lower_score(model, P, G),
        runner.sampler.lower(model, P, G, TP),
    ]  # fmt: skip
    for each in lowered:
        assert "bf16" in each.as_text()
    (after, *_), scores, made = (each.out_info for each in lowered)
    floats = jax.tree.leaves((eqx.filter(after, eqx.is_array_like), scores, made.logps))
    assert all(x.dtype == jnp.float32 for x in floats)


@pytest.mark.parametrize(
    ("dtype", "multiple", "stored"),
    [("bfloat16", 1, 64 * 2), ("bfloat16", 128, 128 * 2), ("int8", 128, 128 + 4)],
)
def test_bytes_of_a_cache_include_zeros_and_scales(dtype: str, multiple: int, stored: int) -> None:
    runner = runner_on(kv_cache_dtype=jnp.dtype(dtype), kv_head_multiple=multiple)
    assert 64 * runner.sampler.options.kv_itemsize(64) == stored
