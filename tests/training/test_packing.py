"""Packing: every completion has a place of its own, after its prompt, in few rows."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_eqx.training.micro_batches import MOST_WIDTH, RowShape
from grpo_eqx.training.packing import Packing

LONGEST_PROMPT, LONGEST = 9, 24


def shape_of(P: int, G: int, size: int | None = None, num_shards: int = 1) -> RowShape:
    return RowShape.of(
        P, G, prompt_length=LONGEST_PROMPT, completion_length=LONGEST, num_shards=num_shards,
        size=size, most_tokens=150,
    )  # fmt: skip


def drawn(seed: int, P: int, G: int, shortest: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Lengths of prompts, and of completions from the shortest to the limit."""
    rng = np.random.default_rng(seed)
    most = rng.integers(max(1, shortest), LONGEST + 1)
    return (
        rng.integers(1, LONGEST_PROMPT + 1, P).astype(np.int32),
        rng.integers(shortest, most + 1, (P, G)).astype(np.int32),
    )


def held(packing: Packing) -> list[dict[str, np.ndarray]]:
    """Places of each row that hold a completion."""
    fields = ("completions", "lengths", "starts", "prompt_starts", "prompt_lengths")
    rows = [getattr(packing, name).reshape(-1, packing.shape.places) for name in fields]
    return [
        {name: x[i][rows[0][i] >= 0] for name, x in zip(fields, rows, strict=True)}
        for i in range(len(rows[0]))
    ]


@settings(max_examples=200)
@given(
    seed=st.integers(0, 10**6),
    P=st.integers(1, 7),
    G=st.integers(1, 9),
    size=st.sampled_from([None, 1, 2, 3, 5, 8]),
    num_shards=st.sampled_from([1, 2, 4]),
)
def test_every_completion_has_a_place(
    seed: int, P: int, G: int, size: int | None, num_shards: int
) -> None:
    """One of its length, which nothing else has, in a row that holds its prompt before it."""
    prompt_lengths, lengths = drawn(seed, P, G)
    packing = Packing.plan(prompt_lengths, lengths, shape_of(P, G, size, num_shards))
    found = np.concatenate([row["completions"] for row in held(packing)])
    assert sorted(found) == np.flatnonzero(lengths).tolist()
    for row in held(packing):
        prompts = row["completions"] // G
        assert (row["lengths"] == lengths.reshape(-1)[row["completions"]]).all()
        assert (row["prompt_lengths"] == prompt_lengths[prompts]).all()
        assert row["lengths"].sum() <= packing.shape.num_scored
        pieces = {*zip(row["starts"], row["lengths"], strict=True)}
        pieces |= {*zip(row["prompt_starts"], row["prompt_lengths"] - 1, strict=True)}
        columns = [column for start, n in pieces for column in range(start, start + n)]
        assert len(columns) == len(set(columns))
        assert max(columns, default=0) < packing.shape.width
        assert (row["prompt_starts"] + row["prompt_lengths"] - 1 <= row["starts"]).all()


@settings(max_examples=50)
@given(seed=st.integers(0, 10**6), num_shards=st.sampled_from([1, 2, 4]))
def test_micro_batches_in_use_come_first(seed: int, num_shards: int) -> None:
    prompt_lengths, lengths = drawn(seed, 6, 8, shortest=1)
    packing = Packing.plan(prompt_lengths, lengths, shape_of(6, 8, 4, num_shards))
    tokens = packing.num_tokens()
    assert (tokens[: packing.number].sum(axis=1) > 0).all()
    assert (tokens[packing.number :] == 0).all()
    assert 1 <= packing.number <= packing.shape.most_micro_batches


@given(seed=st.integers(0, 10**6), sizes=st.lists(st.integers(1, 9), min_size=1, max_size=12))
def test_prompts_may_have_different_numbers_of_completions(seed: int, sizes: list[int]) -> None:
    """And more of them than the shape is for: rows then have more micro-batches."""
    rng = np.random.default_rng(seed)
    prompt_lengths = rng.integers(1, LONGEST_PROMPT + 1, len(sizes)).astype(np.int32)
    lengths = [rng.integers(1, LONGEST + 1, size).tolist() for size in sizes]
    packing = Packing.plan(prompt_lengths, lengths, shape_of(2, 3))
    assert packing.num_completions == sum(sizes)
    found = np.concatenate([row["completions"] for row in held(packing)])
    assert sorted(found) == [*range(sum(sizes))]
    flat, prompts = [n for each in lengths for n in each], np.repeat(range(len(sizes)), sizes)
    for row in held(packing):
        assert row["lengths"].tolist() == [flat[n] for n in row["completions"]]
        assert (row["prompt_lengths"] == prompt_lengths[prompts[row["completions"]]]).all()


@pytest.mark.parametrize("size", [1, 4, 8, None])
def test_rows_of_full_length_are_full(size: int | None) -> None:
    prompt_lengths = np.full(8, LONGEST_PROMPT, np.int32)
    packing = Packing.plan(prompt_lengths, np.full((8, 8), LONGEST, np.int32), shape_of(8, 8, size))
    assert packing.number == packing.shape.most_micro_batches
    assert packing.padding_share == 0


@pytest.mark.parametrize("seed", range(5))
def test_little_is_padding(seed: int) -> None:
    """A batch of many rows with a long tail fills them."""
    rng = np.random.default_rng(seed)
    prompt_lengths = rng.integers(5, LONGEST_PROMPT + 1, 64).astype(np.int32)
    lengths = rng.geometric(1 / 8, (64, 8)).clip(1, LONGEST).astype(np.int32)
    for num_shards in (1, 4):
        packing = Packing.plan(prompt_lengths, lengths, shape_of(64, 8, None, num_shards))
        assert packing.padding_share < 0.15
        assert packing.balance > 0.9
        alone = (prompt_lengths - 1).sum() + lengths.sum()
        assert packing.num_tokens().sum() < 1.15 * alone  # few prompts have copies


def test_padding_and_balance_are_counted_by_hand() -> None:
    """Two devices with a row of 16 each: prompts of 3 tokens but one, completions of 10 and 4."""
    shape = RowShape(
        most_micro_batches=1,
        num_rows=2,
        num_shards=2,
        width=16,
        num_scored=12,
        places=4,
        completion_length=10,
    )
    packing = Packing.plan(np.array([3, 3]), np.array([[10], [4]]), shape)
    assert sorted(packing.num_tokens().reshape(-1)) == [6, 12]
    assert packing.padding_share == 1 - 18 / 32
    assert packing.balance == 9 / 12


def test_the_shape_follows_from_the_longest_lengths() -> None:
    """A long prompt is in a row with its whole group, a short one with one full completion."""

    def shape(prompt: int, completion: int, **others: int | None) -> RowShape:
        return RowShape.of(
            16, 8, prompt_length=prompt, completion_length=completion,
            **{"num_shards": 4, "size": None, "most_tokens": 1000, **others},
        )  # fmt: skip

    assert shape(513, 128).width == 512 + 8 * 128
    assert shape(33, 512).width == 32 + 512
    assert shape(33, 100).width == 32 + 4 * 100  # six of a group of eight would leave two
    assert shape(33, 100).num_rows == 4 * 2
    assert shape(1, 100).num_rows == 4 * 10
    assert shape(513, 128, size=1).width == 512 + 128
    assert shape(513, 128, size=16).num_rows == 4 * 2
    assert shape(513, 128, size=10**6).most_micro_batches == 1
    assert shape(2049, 2048).width <= MOST_WIDTH
    assert shape(2049, 10**5).width == 2048 + 10**5


@pytest.mark.parametrize("multiple", [1, 16, 128])
def test_a_row_is_as_wide_as_its_completions_need_and_fills_whole_vectors(multiple: int) -> None:
    narrow, shape = (
        RowShape.of(
            8, 4, prompt_length=21, completion_length=50, num_shards=1, size=4, most_tokens=0,
            multiple=each,
        )
        for each in (1, multiple)
    )  # fmt: skip
    assert shape.width % multiple == 0
    assert 0 <= shape.width - narrow.width < multiple
    assert dataclasses.replace(shape, width=narrow.width) == narrow
