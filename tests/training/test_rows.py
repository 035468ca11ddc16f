"""Rows: spelled out, they hold the tokens that packing says, and scores come back."""

import jax.numpy as jnp
import numpy as np
import pytest

from grpo_eqx.generation import Prompts, Rollout
from grpo_eqx.training.packing import Packing
from grpo_eqx.training.row_shape import RowShape
from grpo_eqx.training.rows import Rows

P, G, TP, TC = 4, 3, 5, 7


def example(seed: int, padded_left: bool = False) -> tuple[Rollout, Packing]:
    """Tokens that say where they belong: 1000 times the prompt, or 100 times the completion."""
    rng = np.random.default_rng(seed)
    prompt_lengths = rng.integers(1, TP + 1, P)
    lengths = rng.integers(0, TC + 1, (P, G))
    ids = 1000 * (1 + np.arange(P)[:, None]) + np.arange(TP)
    mask = np.arange(TP) < prompt_lengths[:, None]
    if padded_left:
        mask = mask[:, ::-1]
        ids = ids - (TP - prompt_lengths)[:, None]
    completion_ids = 100 * (1 + np.arange(P * G).reshape(P, G, 1)) + np.arange(TC)
    completion_mask = np.arange(TC) < lengths[..., None]
    rollout = Rollout(
        Prompts(jnp.asarray(ids), jnp.asarray(mask)), jnp.asarray(completion_ids),
        jnp.asarray(completion_mask), jnp.zeros((P, G, TC)), jnp.ones((P, G), bool),
    )  # fmt: skip
    shape = RowShape.of(
        P, G, prompt_length=TP, completion_length=TC, num_shards=1, size=4, most_tokens=1
    )
    return rollout, Packing.plan(prompt_lengths, lengths, shape)


@pytest.mark.parametrize("padded_left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize("seed", range(3))
def test_inputs_positions_and_targets_are_those_of_each_sequence(
    seed: int, padded_left: bool
) -> None:
    """Read along what each position sees, a row gives the prompt and completion, one by one."""
    rollout, packing = example(seed, padded_left)
    lengths = np.asarray(rollout.lengths).reshape(-1)
    prompt_lengths = np.asarray(rollout.prompts.mask).sum(axis=1)
    scored = set()
    for micro_batch in range(int(packing.number)):
        rows = Rows.of(packing, jnp.int32(micro_batch), G)
        inputs, targets = np.asarray(rows.inputs(rollout)), np.asarray(rows.targets(rollout))
        own, first, end = map(np.asarray, rows.visible)
        for r, s in np.argwhere(targets >= 0):
            completion, offset = divmod(int(targets[r, s]) - 100, 100)
            prompt, n = completion // G, prompt_lengths[completion // G]
            column = int(rows.scored[r, s])
            seen = [*range(first[r, column], end[r, column]), *range(own[r, column], column + 1)]
            sequence = [1000 * (1 + prompt) + t for t in range(n)]
            sequence += [100 * (1 + completion) + t for t in range(offset)]
            assert inputs[r, seen].tolist() == sequence
            assert np.asarray(rows.positions)[r, seen].tolist() == [*range(n + offset)]
            scored.add((completion, offset))
    assert scored == {(c, t) for c, n in enumerate(lengths) for t in range(n)}


def test_scores_come_back_to_their_completions() -> None:
    rollout, packing = example(5)
    found = jnp.full((P, G, TC), -1.0)
    for micro_batch in range(int(packing.number)):
        rows = Rows.of(packing, jnp.int32(micro_batch), G)
        scores = rows.by_completion(rows.targets(rollout).astype(jnp.float32), TC)
        found = rows.put(found, scores)
    mask = np.asarray(rollout.completion_mask)
    np.testing.assert_array_equal(found[mask], np.asarray(rollout.completion_ids)[mask])


def test_values_are_picked_for_the_completions_of_each_place() -> None:
    _, packing = example(6)
    rows = Rows.of(packing, jnp.int32(0), G)
    picked = rows.pick(jnp.arange(P * G).reshape(P, G))
    there = np.asarray(rows.completions) >= 0
    np.testing.assert_array_equal(picked[there], rows.completions[there])


def test_positions_that_hold_nothing_see_themselves_alone() -> None:
    _, packing = example(7)
    rows = Rows.of(packing, jnp.int32(0), G)
    own, first, end = map(np.asarray, rows.visible)
    last = int((packing.starts + packing.lengths)[0, 0].max())
    assert last < packing.shape.width
    assert own[0, last:].tolist() == [*range(last, packing.shape.width)]
    assert (first[0, last:] >= end[0, last:]).all()
