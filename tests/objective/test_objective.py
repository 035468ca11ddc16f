"""The whole objective: what it is on-policy, and what it must not depend on, whatever its settings.

Batches are drawn at random; each setting of `SETTINGS` is compiled once for each shape.
"""

import functools
from collections.abc import Iterator
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_eqx.common.choices import (
    CLIPPED_LOSSES,
    ImportanceSamplingLevel,
    LossType,
)
from grpo_eqx.objective import (
    Metrics,
    Objective,
    TokenBatch,
    Totals,
    token_weights,
)
from grpo_eqx.objective.policy_loss import cispo_loss, clipped_loss, sapo_loss
from grpo_eqx.objective.ratios import policy_ratios

P, G, T = 2, 4, 5
LOSS_TYPES: tuple[LossType, ...] = get_args(LossType)
LEVELS: tuple[ImportanceSamplingLevel, ...] = get_args(ImportanceSamplingLevel)
TESTED: tuple[tuple[LossType, ImportanceSamplingLevel], ...] = (
    ("grpo", "token"), ("grpo", "sequence"), ("bnpo", "sequence_token"), ("dr_grpo", "token"),
    ("dapo", "sequence"), ("dapo", "sequence_token"), ("cispo", "token"), ("cispo", "sequence"),
    ("sapo", "token"), ("sapo", "sequence_token"),
)  # fmt: skip


def various_settings() -> Iterator[Objective]:
    """Loss types and levels in the combinations above; the other options take turns."""
    kl: Iterator[dict[str, Any]] = cycle([
        {},
        {"beta": 0.1, "kl_estimator": "k3"},
        {"beta": 0.1, "kl_estimator": "k1", "use_bias_correction_kl": False},
        {},
        {"beta": 0.1, "kl_estimator": "k2", "kl_clamp": 0.1},
    ])  # fmt: skip
    sampler: Iterator[dict[str, Any]] = cycle([
        {"importance_sampling_mode": "sequence_mask"},
        {"importance_sampling_mode": "token_truncate", "importance_sampling_clip_min": 0.9},
        {},
        {"importance_sampling_mode": "sequence_truncate"},
        {},
        {"importance_sampling_mode": "token_mask", "importance_sampling_clip_min": 0.9},
    ])  # fmt: skip
    rest: Iterator[dict[str, Any]] = cycle([
        {"entropy_coef": 0.1, "dual_clip": 1.4},
        {"off_policy_mask_threshold": 0.02},
        {"delta": 1.4},
    ])  # fmt: skip
    for loss_type, level in TESTED:
        yield Objective(
            loss_type=loss_type,
            importance_sampling_level=level,
            epsilon_high=1.2 if loss_type == "cispo" else 0.28,
            importance_sampling_clip_max=1.1,
            max_completion_length=T,
            **next(kl),
            **next(sampler),
            **next(rest),
        )


SETTINGS = tuple(various_settings())
seeds = st.integers(0, 2**32 - 1)
objectives = st.sampled_from(SETTINGS)
a_few = settings(max_examples=30)


class Evaluation(NamedTuple):
    """What an objective makes of a batch."""

    loss: np.ndarray
    gradients: tuple[np.ndarray, np.ndarray]
    """For the log-probs and for the entropies."""
    metrics: dict[str, np.ndarray]


def random_batch(seed: int) -> TokenBatch:
    """A batch with gaps in its masks, ratios on both sides of every bound, and arbitrary signs."""
    rng = np.random.default_rng(seed)

    def near(logps: np.ndarray) -> np.ndarray:
        return (logps + rng.normal(0, 0.3, logps.shape)).astype(np.float32)

    old_logps = near(np.full((P, G, T), -2.0))
    return TokenBatch(
        logps=near(old_logps),
        entropies=rng.uniform(0, 3, (P, G, T)).astype(np.float32),
        sampler_logps=near(old_logps),
        advantages=rng.normal(size=(P, G)).astype(np.float32),
        mask=rng.random((P, G, T)) < 0.7,
        policy_mask=rng.random((P, G, T)) < 0.7,
        old_logps=old_logps,
        ref_logps=near(old_logps),
    )


def totals_of(batch: TokenBatch) -> Totals:
    acted_on = batch.mask if batch.policy_mask is None else batch.policy_mask
    return Totals.of(jnp.asarray(batch.mask), jnp.asarray(acted_on))


@partial(jax.jit, static_argnums=0)
def evaluate_parts(
    objective: Objective, parts: TokenBatch, totals: Totals
) -> tuple[jax.Array, tuple[jax.Array, jax.Array], dict[str, jax.Array]]:
    """Loss and merged metrics of all micro-batches, and the gradients in each."""

    def of_part(part: TokenBatch) -> tuple[tuple[jax.Array, Metrics], tuple[jax.Array, jax.Array]]:
        def loss(logps: jax.Array, entropies: jax.Array) -> tuple[jax.Array, Metrics]:
            return objective(part._replace(logps=logps, entropies=entropies), totals)

        return jax.value_and_grad(loss, (0, 1), has_aux=True)(part.logps, part.entropies)

    (losses, metrics), gradients = jax.vmap(of_part)(parts)
    each = [jax.tree.map(lambda x, i=i: x[i], metrics) for i in range(len(losses))]
    return losses.sum(), gradients, functools.reduce(Metrics.merged, each).values()


def evaluate(objective: Objective, batch: TokenBatch, cuts: tuple[int, int] = (1, 1)) -> Evaluation:
    """In micro-batches: so many along the prompts, times so many along the samples."""

    def cut(x: np.ndarray) -> np.ndarray:
        return np.stack(
            [part for row in np.split(x, cuts[0]) for part in np.split(row, cuts[1], 1)]
        )

    def join(parts: np.ndarray) -> np.ndarray:
        rows = np.split(parts, cuts[0])
        return np.concatenate([np.concatenate(row, axis=1) for row in rows])

    parts = jax.tree.map(cut, batch)
    loss, gradients, metrics = jax.device_get(evaluate_parts(objective, parts, totals_of(batch)))
    return Evaluation(loss, jax.tree.map(join, gradients), metrics)


def assert_same(found: Evaluation, expected: Evaluation) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), found, expected
    )


# On-policy


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_on_policy_every_tokens_gradient_is_minus_the_advantage(
    loss_type: LossType, level: ImportanceSamplingLevel
) -> None:
    """Before aggregation, in the sum of all tokens' losses."""
    batch = random_batch(0)
    advantages, mask = jnp.asarray(batch.advantages), jnp.asarray(batch.mask)

    def summed(logps: jax.Array) -> jax.Array:
        ratios = policy_ratios(logps, jax.lax.stop_gradient(logps), mask, level)
        if loss_type == "cispo":
            losses = cispo_loss(logps, ratios, advantages, epsilon_high=5.0).losses
        elif loss_type == "sapo":
            losses = sapo_loss(ratios, advantages, temperature_pos=1.0, temperature_neg=1.05).losses
        else:
            losses = clipped_loss(ratios, advantages, epsilon=0.2, epsilon_high=0.28).losses
        return jnp.sum(mask * losses)

    found = jax.jit(jax.grad(summed))(jnp.asarray(batch.logps))
    expected = np.where(batch.mask, -batch.advantages[..., None], 0)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_on_policy_the_gradient_is_minus_the_advantage_times_the_tokens_weight(
    loss_type: LossType, level: ImportanceSamplingLevel
) -> None:
    objective = Objective(
        loss_type=loss_type,
        importance_sampling_level=level,
        epsilon_high=5.0 if loss_type == "cispo" else 0.28,
        max_completion_length=T,
    )
    batch = random_batch(0)._replace(old_logps=None, ref_logps=None, policy_mask=None)
    found = evaluate(objective, batch)
    weights = token_weights(jnp.asarray(batch.mask), loss_type, totals_of(batch), T)
    expected = -batch.advantages[..., None] * weights
    np.testing.assert_allclose(found.gradients[0], expected, rtol=1e-6, atol=1e-6)
    assert found.metrics["policy_ratio/min"] == found.metrics["policy_ratio/max"] == 1


# Off-policy


def test_every_term_comes_in_its_place() -> None:
    """Masks and sampler weights act on the policy losses alone, and the entropy is the mean over
    the tokens that these act on.
    """
    batch = random_batch(1)
    objective = Objective(
        loss_type="dapo",
        beta=0.1,
        kl_estimator="k1",
        importance_sampling_mode="token_mask",
        importance_sampling_clip_max=1.1,
        off_policy_mask_threshold=0.0,
        entropy_coef=0.3,
    )
    loss, tokens, entropies = 0.0, 0, []
    for p, g in np.ndindex(P, G):
        mask = batch.mask[p, g]
        logps, old, sampler, ref = (
            x[p, g][mask].astype(np.float64)
            for x in (batch.logps, batch.old_logps, batch.sampler_logps, batch.ref_logps)
        )
        advantage, acts = float(batch.advantages[p, g]), batch.policy_mask[p, g][mask]
        ratios, weights = np.exp(logps - old), np.exp(old - sampler)
        losses = -np.minimum(ratios * advantage, np.clip(ratios, 0.8, 1.2) * advantage)
        losses *= np.where(weights > 1.1, 0, weights) * acts
        losses *= advantage >= 0 or np.mean(sampler - logps) <= 0
        loss += np.sum(losses + 0.1 * ratios * (logps - ref))
        tokens += mask.sum()
        entropies += list(batch.entropies[p, g][mask][acts])
    expected = loss / tokens - 0.3 * np.mean(entropies)
    np.testing.assert_allclose(evaluate(objective, batch).loss, expected, rtol=1e-5)


def test_what_is_not_given_is_the_policy_itself_and_all_tokens() -> None:
    batch = random_batch(2)._replace(policy_mask=None, old_logps=None)
    given_all = batch._replace(policy_mask=np.full((P, G, T), True), old_logps=batch.logps)
    assert_same(evaluate(SETTINGS[1], batch), evaluate(SETTINGS[1], given_all))


@a_few
@given(objectives, seeds)
def test_cutting_the_batch_changes_nothing(objective: Objective, seed: int) -> None:
    """Along the prompts and along the samples."""
    batch = random_batch(seed)
    assert_same(evaluate(objective, batch, (P, 2)), evaluate(objective, batch))


@pytest.mark.parametrize("cuts", [(P, 1), (1, G), (P, G)])
@pytest.mark.parametrize("objective", SETTINGS[:2], ids=["token", "sequence"])
def test_any_cut_will_do(objective: Objective, cuts: tuple[int, int]) -> None:
    batch = random_batch(4)
    assert_same(evaluate(objective, batch, cuts), evaluate(objective, batch))


@a_few
@given(objectives, seeds, st.permutations(range(P)), st.permutations(range(G)))
def test_order_of_groups_and_samples_does_not_matter(
    objective: Objective, seed: int, prompts: list[int], samples: list[int]
) -> None:
    def shuffled(x: np.ndarray) -> np.ndarray:
        return x[prompts][:, samples]

    batch = random_batch(seed)
    found = evaluate(objective, jax.tree.map(shuffled, batch))
    expected = evaluate(objective, batch)
    assert_same(found, expected._replace(gradients=jax.tree.map(shuffled, expected.gradients)))


@a_few
@given(objectives, seeds)
def test_what_is_masked_never_counts(objective: Objective, seed: int) -> None:
    """Neither its values, NaN included, nor how much of it there is."""
    batch = random_batch(seed)
    rng = np.random.default_rng(seed)
    mask = np.concatenate([batch.mask, np.full((P, G, 2), False)], axis=-1)

    def with_junk(x: np.ndarray) -> np.ndarray:
        if x.ndim < 3:
            return x  # one value a sequence
        padded = np.concatenate([x, x[..., :2]], axis=-1)
        junk = [False, True] if x.dtype == bool else [np.nan, np.inf, -np.inf, 1e38, 0, -3]
        return np.where(mask, padded, rng.choice(junk, mask.shape)).astype(x.dtype)

    junked = jax.tree.map(with_junk, batch)._replace(mask=mask)
    found, expected = evaluate(objective, junked), evaluate(objective, batch)
    assert all((x[~mask] == 0).all() for x in found.gradients)
    assert_same(
        found._replace(gradients=jax.tree.map(lambda x: x[..., :T], found.gradients)), expected
    )


@pytest.mark.parametrize("objective", SETTINGS[:2], ids=["token", "sequence"])
def test_sequences_of_one_token_at_most_are_no_special_case(objective: Objective) -> None:
    batch = random_batch(5)
    batch.mask[..., 1:] = False
    assert not batch.mask.any(axis=-1).all()
    short = jax.tree.map(lambda x: x[..., :1] if x.ndim == 3 else x, batch)
    found, expected = evaluate(objective, short), evaluate(objective, batch)
    assert_same(
        found, expected._replace(gradients=jax.tree.map(lambda x: x[..., :1], expected.gradients))
    )


@a_few
@given(objectives, seeds)
def test_sequences_without_tokens_or_advantage_have_no_policy_gradient(
    objective: Objective, seed: int
) -> None:
    batch = random_batch(seed)
    batch.mask[0, 1:] = False
    batch.advantages[1] = 0
    found = evaluate(objective, batch)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(found))
    assert all((x[0, 1:] == 0).all() for x in found.gradients)
    if objective.beta == 0:
        assert (found.gradients[0][1] == 0).all()
    assert found.metrics["effective_batch/completions"] <= 1


@settings(max_examples=15)
@given(objectives, seeds)
def test_nothing_comes_of_a_batch_that_is_masked_as_a_whole(
    objective: Objective, seed: int
) -> None:
    batch = random_batch(seed)
    batch.mask[:] = False
    found = evaluate(objective, batch)
    assert {name for name, x in found.metrics.items() if x != 0} == set()
    assert all((x == 0).all() for x in jax.tree.leaves(found))


# Metrics

EVERYWHERE = {
    "loss",
    "entropy",
    *(f"policy_ratio/{kind}" for kind in ("mean", "min", "max")),
    *(f"sampling/sampling_logp_difference/{kind}" for kind in ("mean", "max")),
    *(f"sampling/importance_sampling_ratio/{kind}" for kind in ("mean", "min", "max")),
    *(f"effective_batch/{kind}" for kind in ("completions", "tokens")),
}
CLIPPING = {
    f"clip_ratio/{kind}" for kind in ("low_mean", "low_min", "high_mean", "high_max", "region_mean")
}


@pytest.mark.parametrize(
    ("loss_type", "names"),
    [
        *((loss_type, CLIPPING) for loss_type in CLIPPED_LOSSES),
        ("cispo", {"cispo_clip_ratio"}),
        ("sapo", set()),
    ],
)
def test_each_loss_type_records_its_metrics(loss_type: LossType, names: set[str]) -> None:
    objective = next(x for x in SETTINGS if x.loss_type == loss_type)
    options: dict[str, bool] = {
        "kl": objective.beta is not None,
        "policy_loss": objective.entropy_coef is not None,
    }
    expected = EVERYWHERE | names | {name for name, recorded in options.items() if recorded}
    assert set(evaluate(objective, random_batch(0)).metrics) == expected


def test_metrics_by_hand() -> None:
    batch = random_batch(3)
    objective = Objective(loss_type="dapo", epsilon_high=0.28)
    metrics = evaluate(objective, batch).metrics
    mask = batch.mask
    ratios = np.exp(batch.logps - batch.old_logps)
    negative = batch.advantages[..., None] < 0
    low, high = (ratios < 0.8) & negative, (ratios > 1.28) & ~negative
    lengths = mask.sum(axis=-1)
    gap = np.abs(batch.old_logps - batch.sampler_logps)[mask]
    expected = {
        "entropy": batch.entropies[mask].mean(),
        "policy_ratio/mean": ratios[mask].mean(),
        "policy_ratio/min": ratios[mask].min(),
        "policy_ratio/max": ratios[mask].max(),
        "clip_ratio/low_mean": low[mask].mean(),
        "clip_ratio/low_min": ((low & mask).sum(axis=-1) / lengths).min(),
        "clip_ratio/high_mean": high[mask].mean(),
        "clip_ratio/high_max": ((high & mask).sum(axis=-1) / lengths).max(),
        "clip_ratio/region_mean": (low | high)[mask].mean(),
        "sampling/sampling_logp_difference/mean": gap.mean(),
        "sampling/sampling_logp_difference/max": gap.max(),
    }
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)


def test_a_sequence_without_tokens_is_no_extreme() -> None:
    """Where every other one is cut on every token."""
    batch = random_batch(0)._replace(advantages=np.full((P, G), -1.0, np.float32))
    batch.mask[:] = batch.mask | (np.arange(T) == 0)
    batch.mask[0, 0] = False
    batch = batch._replace(logps=batch.old_logps - 1)
    metrics = evaluate(Objective(), batch).metrics
    assert metrics["clip_ratio/low_min"] == 1
    np.testing.assert_allclose(metrics["policy_ratio/max"], np.exp(-1), rtol=1e-5)


def test_the_effective_batch_is_what_the_policy_term_acts_on() -> None:
    """Tokens that are masked, have no advantage, or a sampler weight of 0 do not count."""
    batch = random_batch(0)._replace(
        mask=np.full((P, G, T), True),
        policy_mask=np.full((P, G, T), True),
        advantages=np.array([[1.0, -1.0, 1.0, -1.0], [0.0, 0.0, 0.0, 0.0]], np.float32),
        sampler_logps=np.full((P, G, T), -1.0, np.float32),
        old_logps=np.full((P, G, T), -1.0, np.float32),
    )
    batch.mask[0, 0, 2:] = False  # leaves 2 of 5 tokens
    batch.policy_mask[0, 1, 1:] = False  # 1
    batch.sampler_logps[0, 2] = -9.0  # 0: all their weights are beyond the clip range
    objective = Objective(importance_sampling_mode="token_mask", importance_sampling_clip_max=3.0)
    metrics = evaluate(objective, batch).metrics
    assert metrics["effective_batch/tokens"] == 2 + 1 + 0 + 5
    assert metrics["effective_batch/completions"] == 3


def test_the_settings_tested_cover_every_choice() -> None:
    choices = {
        "loss_type": 6, "importance_sampling_level": 3, "beta": 2, "kl_estimator": 3, "kl_clamp": 2,
        "use_bias_correction_kl": 2, "importance_sampling_mode": 5, "delta": 2, "dual_clip": 2,
        "importance_sampling_clip_min": 2, "off_policy_mask_threshold": 2, "entropy_coef": 2,
    }  # fmt: skip
    assert choices == {name: len({getattr(x, name) for x in SETTINGS}) for name in choices}


@pytest.mark.grid
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("objective", [*SETTINGS, Objective(), Objective(beta=0.1)])
def test_log_probs_that_are_far_apart_give_finite_losses_and_gradients(
    objective: Objective, advantage: float
) -> None:
    far = jnp.asarray([[[-150.0, -1.0, -150.0], [-1.0, -150.0, -1.0]]])
    batch = TokenBatch(
        logps=far, entropies=jnp.ones_like(far), sampler_logps=-151 - far,
        advantages=jnp.full((1, 2), advantage), mask=jnp.ones(far.shape, bool),
        old_logps=-151 - far, ref_logps=-151 - far,
    )  # fmt: skip
    loss, gradient = jax.value_and_grad(
        lambda logps: objective(batch._replace(logps=logps), totals_of(batch))[0]
    )(far)
    assert jnp.isfinite(loss)
    assert jnp.isfinite(gradient).all()
