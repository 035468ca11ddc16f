"""Rows hold the tokens that packing says, and scores come back to their completions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_eqx.data.trajectory import Group
from grpo_eqx.sharding import parse_mesh
from grpo_eqx.training.micro_batches import RowShape
from grpo_eqx.training.packing import Packing
from grpo_eqx.training.rows import pack, place_tokens, place_values, take_tokens, with_loss

from .runner import sample_of

P, G, TP, TC = 4, 3, 5, 7
MESH = parse_mesh("auto").build(jax.devices()[:1])


def example(seed: int, num_shards: int = 1) -> tuple[list[Group], Packing]:
    """Tokens that say where they belong: 1000 times the prompt, or 100 times the completion."""
    rng = np.random.default_rng(seed)
    prompt_lengths = rng.integers(1, TP + 1, P)
    lengths = rng.integers(0, TC + 1, (P, G))
    prompts = [[1000 * (1 + p) + t for t in range(n)] for p, n in enumerate(prompt_lengths)]
    ids = 100 * (1 + np.arange(P * G).reshape(P, G, 1)) + np.arange(TC)
    logps = -ids.astype(np.float32)
    made = sample_of(prompts, ids, lengths, logps, np.ones((P, G), bool))
    shape = RowShape.of(
        P, G, prompt_length=TP, completion_length=TC, num_shards=num_shards, size=4, most_tokens=1
    )
    return made.groups, Packing.plan(prompt_lengths, lengths, shape)


@pytest.mark.parametrize("seed", range(3))
def test_inputs_positions_and_targets_are_those_of_each_sequence(seed: int) -> None:
    """Read along what each position sees, a row gives the prompt and completion, one by one."""
    groups, packing = example(seed)
    rows = jax.tree.map(np.asarray, pack(groups, packing, MESH))
    own, first, end = rows.visible
    scored = set()
    for m, r, s in np.argwhere(rows.targets >= 0):
        completion, offset = divmod(int(rows.targets[m, r, s]) - 100, 100)
        prompt, column = groups[completion // G][0].prompt_ids, int(rows.scored[m, r, s])
        prompt_part = range(first[m, r, column], end[m, r, column])
        seen = [*prompt_part, *range(own[m, r, column], column + 1)]
        sequence = [*prompt, *(100 * (1 + completion) + t for t in range(offset))]
        assert rows.ids[m, r, seen].tolist() == sequence
        assert rows.positions[m, r, seen].tolist() == [*range(len(sequence))]
        assert rows.is_completion[m, r, column]
        assert rows.sampler_logps[m, r, s] == -rows.targets[m, r, s]
        scored.add((completion, offset))
    lengths = [len(each) for group in groups for each in group]
    assert scored == {(c, t) for c, n in enumerate(lengths) for t in range(n)}
    assert rows.is_completion.sum() == sum(lengths)


@pytest.mark.parametrize("seed", range(3))
def test_values_of_tokens_come_back_to_their_completions(seed: int) -> None:
    groups, packing = example(seed)
    ids = [each.ids for group in groups for each in group]
    there = np.asarray(place_tokens(ids, packing, MESH))
    for found, expected in zip(take_tokens(there, packing), ids, strict=True):
        np.testing.assert_array_equal(found, expected)
    rows = pack(groups, packing, MESH)
    for m in range(packing.number):
        own = rows.micro_batch(jnp.int32(m))
        laid_out = np.asarray(own.by_completion(jnp.asarray(there[m])))
        for r, c in np.argwhere(packing.completions[m] >= 0):
            expected = ids[packing.completions[m, r, c]]
            assert np.asarray(own.is_token())[r, c].sum() == len(expected)
            np.testing.assert_array_equal(laid_out[r, c, : len(expected)], expected)


def test_a_value_of_a_completion_is_at_its_place() -> None:
    _, packing = example(6)
    numbers = np.asarray(place_values(np.arange(1, P * G + 1), packing, MESH))
    np.testing.assert_array_equal(numbers, packing.completions + 1)


def test_counts_are_of_what_the_loss_counts() -> None:
    groups, packing = example(8)
    rng = np.random.default_rng(8)
    counted = [rng.random(len(each)) < 0.3 for group in groups for each in group]
    rows = with_loss(
        pack(groups, packing, MESH), packing, MESH, counted, np.zeros(P * G), tokens_per_update=2.5
    )
    assert rows.counts is not None
    assert rows.counts.tokens == sum(mask.sum() for mask in counted)
    assert rows.counts.filled_sequences == sum(mask.any() for mask in counted)
    assert rows.counts.tokens_per_update == 2.5
    for found, expected in zip(
        take_tokens(np.asarray(rows.counted), packing), counted, strict=True
    ):
        np.testing.assert_array_equal(found, expected)


def test_positions_that_hold_nothing_see_themselves_alone() -> None:
    groups, packing = example(7)
    rows = jax.tree.map(np.asarray, pack(groups, packing, MESH))
    own, first, end = (x[0, 0] for x in rows.visible)
    last = int((packing.starts + packing.lengths)[0, 0].max())
    assert last < packing.shape.width
    assert own[last:].tolist() == [*range(last, packing.shape.width)]
    assert (first[last:] >= end[last:]).all()


@pytest.mark.parametrize("mesh", ["auto", "2,2,2", "1,2,4"])
def test_rows_are_the_same_on_any_devices(mesh: str) -> None:
    many = parse_mesh(mesh).build()
    groups, packing = example(9, num_shards=many.shape["dp"] * many.shape["fsdp"])
    jax.tree.map(
        np.testing.assert_array_equal, pack(groups, packing, many), pack(groups, packing, MESH)
    )
