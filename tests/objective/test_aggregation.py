"""What tokens count for, by hand, and in micro-batches."""

from typing import get_args

import jax.numpy as jnp
import numpy as np
import pytest

from grpo_eqx.common.choices import LossType
from grpo_eqx.objective import Totals, token_weights

# Two prompts, two completions each: 3, 1, 2 and no tokens that count.
MASK = jnp.asarray([[[1, 1, 1], [1, 0, 0]], [[0, 1, 1], [0, 0, 0]]], bool)
LOSSES = np.random.default_rng(0).normal(size=MASK.shape)
LIMIT = 10


def totals_of(mask: jnp.ndarray) -> Totals:
    return Totals.of(mask, mask)


@pytest.mark.parametrize(
    ("loss_types", "of_sequences"),
    [
        (("grpo", "sapo"), [[1 / 4 / 3, 1 / 4 / 1], [1 / 4 / 2, 0]]),
        (("dapo", "cispo", "bnpo"), [[1 / 6, 1 / 6], [1 / 6, 0]]),
        (("dr_grpo",), [[1 / 40, 1 / 40], [1 / 40, 0]]),
    ],
)
def test_weights_by_hand(loss_types: tuple[LossType, ...], of_sequences: list[list[float]]) -> None:
    expected = np.asarray(MASK) * np.array(of_sequences)[..., None]
    for loss_type in loss_types:
        found = token_weights(MASK, loss_type, totals_of(MASK), LIMIT)
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_weighted_sums_are_the_means_they_stand_for() -> None:
    rows = [LOSSES[p, g][np.asarray(MASK)[p, g]] for p, g in np.ndindex(2, 2)]
    means = {
        "grpo": np.mean([row.mean() if len(row) else 0.0 for row in rows]),
        "dapo": np.concatenate(rows).mean(),
        "dr_grpo": sum(row.sum() for row in rows) / (4 * LIMIT),
    }
    for loss_type, expected in means.items():
        weights = token_weights(MASK, loss_type, totals_of(MASK), LIMIT)
        np.testing.assert_allclose(np.sum(weights * LOSSES), expected, rtol=1e-6)


def test_a_token_of_a_rollout_counts_the_same_in_every_update() -> None:
    """In TRL's dapo and cispo; bnpo divides by the tokens of the update alone."""
    shares = [MASK[:1], MASK[1:]]  # of four tokens and of two
    totals = [Totals.of(mask, mask, jnp.float32(6 / 2)) for mask in shares]
    for loss_type, expected in (("dapo", (1 / 3, 1 / 3)), ("bnpo", (1 / 4, 1 / 2))):
        for mask, of_share, weight in zip(shares, totals, expected, strict=True):
            found = token_weights(mask, loss_type, of_share, LIMIT)
            np.testing.assert_allclose(found, mask * weight, rtol=1e-6)


@pytest.mark.parametrize("loss_type", get_args(LossType))
def test_micro_batches_weigh_tokens_as_the_whole_batch_does(loss_type: LossType) -> None:
    totals = totals_of(MASK)
    whole = token_weights(MASK, loss_type, totals, LIMIT)
    for axis in (0, 1):
        parts = [token_weights(x, loss_type, totals, LIMIT) for x in jnp.split(MASK, 2, axis)]
        np.testing.assert_array_equal(jnp.concatenate(parts, axis), whole)


@pytest.mark.parametrize("loss_type", get_args(LossType))
def test_nothing_to_count_has_weight_zero(loss_type: LossType) -> None:
    nothing = jnp.zeros_like(MASK)
    assert (token_weights(nothing, loss_type, totals_of(nothing), LIMIT) == 0).all()
