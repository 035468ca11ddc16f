"""How often open loops run."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_eqx.generation import engine
from grpo_eqx.models.attention import CACHE_BLOCKS
from grpo_eqx.models.causal_attention import BlockedAttention, BlockSizes
from grpo_eqx.models.causal_attention.base import Inputs
from grpo_eqx.models.causal_attention.blocked import BLOCK_PAIRS, QUERY_BLOCKS, BlockCounts
from grpo_eqx.planner.trips import (
    Decoding,
    Expected,
    MicroBatches,
    Range,
    Trips,
    Turns,
    open_loops,
)
from grpo_eqx.planner.work import ATTENTION, Level, Loop, Work, work_levels
from grpo_eqx.sharding import parse_mesh
from grpo_eqx.training.micro_batches import RowShape
from grpo_eqx.training.packing import Packing
from grpo_eqx.training.rows import Rows, pack
from grpo_eqx.training.scorer import MICRO_BATCHES

from ..training.runner import sample_of


def loop(name: str, scope: str) -> Loop:
    return Loop(name, None, "moved.py:1", scope)


QUEUE = loop("queue", engine.REFILLS)
TOKENS, LAST, FEWER = (loop(name, engine.TOKENS) for name in ("tokens", "last", "fewer"))
LAYERS = Loop("layers", 4, "decoder.py:226")
BLOCKS = loop("blocks", CACHE_BLOCKS)


def repeats(
    trips: Trips,
    *paths: tuple[Loop, ...],
    length: int,
    turns: int = 1,
    observation: int = 0,
    longest: int | None = None,
) -> list[Range]:
    levels = [Level(path, Work()) for path in paths]
    found = trips.repeats(levels, Expected(length, turns, observation, longest))
    return [found[tuple(each for each in path if each.trips is None)].times for path in paths]


def decoding(num_slots: int, cache_parts: int = 1) -> Decoding:
    return Decoding(
        num_completions=64,
        num_slots=num_slots,
        num_shards=2,
        max_length=512,
        prompt_length=300,
        attention_blocks=BlockSizes(128, 128),
        cache_parts=cache_parts,
    )


def test_a_slot_for_each_completion_decodes_as_long_as_the_longest() -> None:
    paths = (TOKENS,), (TOKENS, LAYERS, BLOCKS), (FEWER,)
    tokens, blocks, fewer = repeats(decoding(64), *paths, length=256)
    assert tokens == Range(256, 512)
    assert blocks == Range(256 * 1.5, 512 * 2.5)  # blocks of 128 tokens, in the mean
    assert fewer == Range(0, 0)


def test_the_loops_of_all_parts_of_a_cache_have_its_blocks() -> None:
    loops = [loop(f"blocks.{i}", CACHE_BLOCKS) for i in range(4)]
    found = repeats(decoding(64, cache_parts=4), *((TOKENS, each) for each in loops), length=256)
    assert sum(each.least for each in found) == 256 * 1.5
    assert sum(each.most for each in found) == 512 * 2.5


def test_slots_that_are_refilled_decode_in_turns() -> None:
    paths = (QUEUE,), (QUEUE, TOKENS), (QUEUE, TOKENS, LAYERS, BLOCKS), (LAST,)
    refills, tokens, blocks, last = repeats(decoding(16), *paths, length=256)
    assert refills == Range(3, 48)
    assert tokens == Range(3 * 256, 3 * 512)
    assert blocks == Range(3 * 256 * 1.5, 3 * 512 * 4)
    assert last == Range(256, 512)


def test_the_longest_completion_decides_where_it_is_known() -> None:
    own = {"length": 256, "longest": 400}
    tokens, blocks = repeats(decoding(64), (TOKENS,), (TOKENS, LAYERS, BLOCKS), **own)
    assert tokens == Range(400, 400)
    assert blocks.least == blocks.most
    in_turn, last = repeats(decoding(16), (QUEUE, TOKENS), (LAST,), **own)
    assert in_turn == Range(3 * 256, 3 * 400)
    assert last == Range(256, 400)
    (tokens,) = repeats(turns("decode", 64), (TOKENS,), **own)
    assert tokens == Range(400, 400)


def test_slots_that_carry_completions_over_never_wait_for_the_longest() -> None:
    carried = dataclasses.replace(turns("decode", 16), is_carried=True)
    (tokens,) = repeats(carried, (TOKENS,), length=256, longest=400)
    assert tokens == Range(4 * 256, 4 * 256)


def turns(program: str, num_slots: int) -> Turns:
    return Turns(program=program, decoding=decoding(num_slots), num_readers=num_slots // 8)


def test_a_session_decodes_what_it_does_not_read() -> None:
    """Four turns, between which 40 tokens are read, in three reads."""
    decode, own = turns("decode", 64), {"length": 256, "turns": 4, "observation": 40}
    assert Trips.from_json(json.loads(json.dumps(decode.to_json()))) == decode
    pauses, tokens, blocks = repeats(decode, (), (TOKENS,), (TOKENS, LAYERS, BLOCKS), **own)
    assert tokens == Range(256 - 120, 512 - 120)
    assert blocks == Range(136 * 1.5, 392 * 4)
    assert pauses == Range(5, 392 / 32 + 64 * 4 / 4)
    reads, blocks = repeats(turns("extend", 64), (), (LAYERS, BLOCKS), **own)
    assert reads == Range(64 * 9 / 8, 64 * 9 / 4)
    assert blocks == Range(72 * 1.5, 144 * 4)
    (prefill,) = repeats(turns("prefill", 64), (), **own)
    assert prefill == Range(1, 1)


def test_slots_of_a_session_take_one_completion_after_the_other() -> None:
    own = {"length": 256, "turns": 4, "observation": 40}
    (tokens,) = repeats(turns("decode", 16), (TOKENS,), **own)
    assert tokens == Range(4 * 136, 4 * 392)
    (refills,) = repeats(turns("admit", 16), (), **own)
    assert refills == Range(3, 48)
    (reads,) = repeats(turns("extend", 16), (), length=256)
    assert reads == Range(0, 0)  # a single turn


def test_prompts_attend_in_blocks() -> None:
    path = (LAYERS, loop("blocks", QUERY_BLOCKS))
    inner = (*path, loop("pairs", BLOCK_PAIRS))
    kernel = (LAYERS, loop("kernel", ATTENTION))
    blocks, pairs, share = repeats(decoding(64), path, inner, kernel, length=8)
    assert blocks == Range(3, 3)
    assert pairs == Range(6, 6)
    assert share == Range(6 / 9, 6 / 9)


def test_the_loops_of_each_pass_are_over_wide_blocks_and_then_the_others() -> None:
    """Of eight blocks, the last four see all of the first four."""
    trips = dataclasses.replace(
        decoding(64), prompt_length=512, attention_blocks=BlockSizes(64, 64, per_wide=4)
    )
    assert Trips.from_json(trips.to_json()) == trips
    blocks = [(LAYERS, loop(name, QUERY_BLOCKS)) for name in "abcd"]
    paths = [each for path in blocks for each in (path, (*path, loop("p", BLOCK_PAIRS)))]
    found = trips.repeats([Level(path, Work()) for path in paths], Expected(8))
    assert [(each.where, each.times.least) for each in found.values()] == 2 * [
        ("prompts' wide block of queries", 1),
        ("prompts' wide pair of blocks", 1),
        ("prompts' block of queries", 8),
        ("prompts' pair of blocks", 36 - 16),
    ]


def test_a_loop_that_nothing_is_known_of_counts_once() -> None:
    unknown = Loop("while.7", None, "mine.py:3")
    found = decoding(64).repeats([Level((TOKENS, unknown), Work())], Expected(256))[TOKENS, unknown]
    assert found.times == Range(256, 512)
    assert found.where == "loop at mine.py:3, counted once"


def packed_rows(prompt_lengths: np.ndarray, lengths: np.ndarray, shape: RowShape) -> Rows:
    """Rows of completions of these lengths, on one device."""
    ids = np.zeros((*lengths.shape, lengths.max()), np.int32)
    sample = sample_of(
        [[1] * n for n in prompt_lengths], ids, lengths, np.zeros(ids.shape), lengths > 0
    )
    mesh = parse_mesh("auto").build(jax.devices()[:1])
    return pack(sample.groups, Packing.plan(prompt_lengths, lengths, shape), mesh)


@pytest.mark.parametrize("length", [5, 40, 128])
def test_micro_batches_and_their_pairs_of_blocks_are_those_that_run(length) -> None:
    rows = RowShape.of(
        4, 4, prompt_length=90, completion_length=128, num_shards=2, size=2, most_tokens=1024
    )
    blocks = BlockedAttention(64).block_sizes(rows.width, 1)
    trips = MicroBatches(
        rows=rows, num_prompts=4, num_generations=4, prompt_length=90, attention_blocks=blocks
    )
    assert Trips.from_json(trips.to_json()) == trips
    micro_batch = loop("m", MICRO_BATCHES)
    queries = micro_batch, LAYERS, loop("q", QUERY_BLOCKS)
    pairs = *queries, loop("p", BLOCK_PAIRS)
    number, *found = repeats(trips, (micro_batch,), queries, pairs, length=length)
    packed = packed_rows(np.full(4, 90), np.full((4, 4), length), rows)
    assert number.least == number.most == int(packed.number)
    expected = np.zeros(2)
    for index in range(int(packed.number)):
        visible = packed.micro_batch(jnp.int32(index)).visible
        (counts,) = BlockCounts.by_width(visible, blocks.queries)
        expected += counts
    assert found == [Range(times, times) for times in expected]


def test_pairs_of_wide_blocks_are_counted_as_such() -> None:
    """In a compiled program, by the work of all pairs, forward and backward."""
    K, repeats, D, per_wide = 2, 3, 8, 3
    rows = RowShape.of(
        1, 4, prompt_length=90, completion_length=40, num_shards=1, size=4, most_tokens=512
    )
    packed = packed_rows(np.full(1, 90), np.full((1, 4), 40), rows)
    assert int(packed.number) == 1
    R, visible = rows.num_rows, packed.micro_batch(jnp.int32(0)).visible
    attention = BlockedAttention(16, per_wide)
    size = attention.block_sizes(rows.width, repeats).queries

    @jax.jit
    @jax.grad
    def gradient(inputs: Inputs) -> jax.Array:
        return attention.attend(inputs, visible, None).sum()

    keys = jnp.ones((R, K, rows.width, D))
    of_loops = gradient.lower(Inputs(jnp.ones((R, K, repeats, rows.width, D)), keys, keys))
    levels = work_levels(of_loops.compile().as_text(), lambda *_: None)
    trips = MicroBatches(
        rows=rows, num_prompts=1, num_generations=4, prompt_length=90,
        attention_blocks=BlockSizes(size, size, per_wide),
    )  # fmt: skip
    found = trips.repeats(levels, Expected(40))
    flops = sum(level.work.flops * found[open_loops(level.loops)].times.least for level in levels)
    wider, narrow = BlockCounts.by_width(visible, size, per_wide)
    assert wider.pairs > 0
    of_pair = (2 + 5) * 2 * R * K * repeats * size**2 * D
    assert flops == of_pair * (int(narrow.pairs) + per_wide**2 * int(wider.pairs))
