"""Packing: every token has a place of its own, and what is packed comes back."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_eqx.training.packing import Packing


def packing_of(
    lengths: np.ndarray, width: int, num_blocks: int = 1, num_bundles: int | None = None
) -> Packing:
    packing = Packing.plan(lengths, width, num_blocks, num_bundles or len(lengths))
    assert packing is not None
    return packing


@settings(max_examples=20)  # each compiles for shapes of its own
@given(
    seed=st.integers(0, 10**6),
    width=st.integers(4, 30),
    cut=st.sampled_from([(1, 4), (2, 4), (4, 4), (1, 1), (1, 2)]),
)
def test_what_is_packed_comes_back(seed: int, width: int, cut: tuple[int, int]) -> None:
    """With groups in blocks, and with prompts in bundles."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, width // 3 + 1, (4, 16)).astype(np.int32)
    packing = packing_of(lengths, width, *cut)
    mask = np.arange(width) < lengths[..., None]
    values = np.where(mask, rng.integers(1, 1000, mask.shape), 0)
    packed = packing.pack(jnp.asarray(values), fill=0)
    assert packed.shape == packing.source.shape
    assert packed.sum() == values.sum()
    found = packing.unpack(packed, width)
    np.testing.assert_array_equal(np.where(mask, found, 0), values)


def test_a_row_says_whose_its_tokens_are() -> None:
    lengths = np.array([[3, 1, 4, 2, 5, 1, 2, 1]], np.int32)
    packing = packing_of(lengths, width=10)
    rows = packing.rows(10)
    assert rows.completions.shape == (1, 2, 10)
    held = np.asarray(rows.completions)
    for g, length in enumerate(lengths[0]):
        offsets = np.asarray(rows.offsets)[held == g]
        assert offsets.tolist() == list(range(length))
    assert (held == -1).sum() == 20 - lengths.sum()


def test_rows_that_would_save_little_are_left_alone() -> None:
    assert Packing.plan(np.full((2, 8), 6, np.int32), 10, 1, 2) is None
    assert Packing.plan(np.full((2, 8), 5, np.int32), 10, 1, 2) is not None


def test_a_row_has_one_prompt() -> None:
    lengths = np.random.default_rng(0).integers(1, 9, (4, 6)).astype(np.int32)
    packing = packing_of(lengths, 20, num_bundles=2)
    for bundle, row in np.ndindex(packing.prompt.shape):
        held = np.asarray(packing.rows(20).completions)[bundle, row]
        assert set(held[held >= 0] // 6) <= {int(packing.prompt[bundle, row])}


@pytest.mark.parametrize("seed", range(3))
def test_whatever_the_lengths_the_shapes_are_few(seed: int) -> None:
    rng = np.random.default_rng(seed)
    drawn = (rng.geometric(1 / rng.integers(2, 60), (4, 8)).clip(1, 40) for _ in range(300))
    plans = [Packing.plan(lengths.astype(np.int32), 40, 1, 1) for lengths in drawn]
    rows = {plan.source.shape[1] for plan in plans if plan is not None}
    assert rows <= {*range(1, 9), 10, 12, 14, 16, 20, 24}
    assert len(rows) > 8


@pytest.mark.parametrize(("needed", "rows"), [(1, 1), (3, 3), (7, 7), (9, 10), (12, 12), (17, 20)])
def test_few_numbers_of_rows_occur(needed: int, rows: int) -> None:
    lengths = np.zeros((2, 32), np.int32)
    lengths[1, :needed] = 10
    assert packing_of(lengths, 10).source.shape == (2, rows, 10)
