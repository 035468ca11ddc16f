"""Counts of the trips, in a step, of loops for which the compiler does not know them."""

import abc
import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from grpo_eqx.generation.engine import REFILLS, TOKENS, refill_at_least
from grpo_eqx.generation.slots import cache_length_of
from grpo_eqx.generation.turn_programs import ADMIT, DECODE, EXTEND, REREAD
from grpo_eqx.generation.turns import CARRIED_AT_ONCE, MOST_STEPS, TOKENS_AT_ONCE
from grpo_eqx.models.attention import CACHE_BLOCKS, ROW_BLOCKS
from grpo_eqx.models.causal_attention import BlockSizes, Visible
from grpo_eqx.models.causal_attention.blocked import BLOCK_PAIRS, QUERY_BLOCKS, BlockCounts
from grpo_eqx.models.kv_cache import CACHE_BLOCK, blocks_of_row
from grpo_eqx.planner.work import ATTENTION, Level, Loop
from grpo_eqx.training.micro_batches import RowShape
from grpo_eqx.training.packing import Packing
from grpo_eqx.training.scorer import MICRO_BATCHES


class Range(NamedTuple):
    """Bounds of a number."""

    least: float
    most: float

    def plus(self, other: "Range") -> "Range":
        """Returns the bounds of a sum."""
        return Range(self.least + other.least, self.most + other.most)

    def times(self, other: "Range | float") -> "Range":
        """Returns the bounds of a product of numbers that are not negative."""
        least, most = other if isinstance(other, Range) else (other, other)
        return Range(self.least * least, self.most * most)


class Expected(NamedTuple):
    """Completions on average."""

    length: int
    """Tokens of a completion, with those that the model reads between its turns."""
    turns: int = 1
    observation_length: int = 0
    """Tokens that the model reads between two turns."""
    longest: int | None = None
    """Tokens of a step's longest completion; `None` where that is not known."""

    def longest_range(self, max_length: int) -> Range:
        """Returns the bounds of a step's longest completion, of at most `max_length` tokens."""
        if self.longest is None:
            return Range(self.length, max_length)
        return Range(self.longest, self.longest)

    @property
    def drawn(self) -> int:
        """Tokens that the model draws."""
        return self.length - self.num_read

    @property
    def num_read(self) -> int:
        """Tokens that the model reads between its turns."""
        return (self.turns - 1) * self.observation_length

    @property
    def reads(self) -> int:
        """Times that a slot reads, of at most `TOKENS_AT_ONCE` tokens."""
        return (self.turns - 1) * -(-self.observation_length // TOKENS_AT_ONCE)


ONCE = Range(1.0, 1.0)
_Path = tuple[Loop, ...]


class Repeats(NamedTuple):
    """Times that a step runs the body of an open loop: one whose trips the compiler does not know.

    The trips of other loops around it do not count.
    """

    where: str
    """Words for the body, such as `each token`."""
    times: Range


class Trips(abc.ABC):
    """Strategy that knows the open loops of a program."""

    def repeats(self, levels: Sequence[Level], expected: Expected) -> dict[_Path, Repeats]:
        """Returns how often the body of each path of open loops runs.

        **Arguments:**

        - `levels`: the levels of a program.
        - `expected`: what completions are like, on average. The longest one has between that length
          and `max_completion_length`.
        """
        paths = list(dict.fromkeys(open_loops(level.loops) for level in levels))
        return {path: self._repeats(path, paths, expected) for path in paths}

    def _repeats(self, path: _Path, paths: Sequence[_Path], expected: Expected) -> Repeats:
        if not path:
            return self.whole(expected)
        known = self.of_body(path, paths, expected)
        if known is not None:
            return known
        before = self._repeats(path[:-1], paths, expected)
        # Nothing is known of it, as of a loop in a user's loss backend.
        where = f"loop at {path[-1].source or path[-1].name}, counted once"
        return Repeats(where, before.times)

    def whole(self, expected: Expected) -> Repeats:
        """Returns how often a step runs what is outside of all open loops."""
        return Repeats("once", ONCE)

    @abc.abstractmethod
    def of_body(self, path: _Path, paths: Sequence[_Path], expected: Expected) -> Repeats | None:
        """Returns how often the body of the last loop of a path runs, `None` if it is unknown.

        **Arguments:**

        - `path`: the path of open loops.
        - `paths`: the paths of the whole program, in order.
        - `expected`: what completions are like, on average.
        """

    @abc.abstractmethod
    def to_json(self) -> dict[str, Any]:
        """Returns its fields as plain JSON."""

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> "Trips":
        """Inverts `to_json`."""
        own: dict[str, Any] = dict(fields)
        if not own:
            return Once()
        if "decoding" in own:
            decoding = Trips.from_json(own.pop("decoding"))
            assert isinstance(decoding, Decoding)
            return Turns(decoding=decoding, **own)
        own["attention_blocks"] = BlockSizes(*own["attention_blocks"])
        if "rows" not in own:
            return Decoding(**own)
        own["rows"] = RowShape(**own["rows"])
        return MicroBatches(**own)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoding(Trips):
    """The loops of `generate`: tokens, refills, blocks of keys, and attention of the prompts.

    Each range has two ends: all completions have the mean length, or one of them has the greatest
    length, which is then the number of tokens that its slot decodes. Where the length of a step's
    longest completion is known, it takes the place of both.
    """

    num_completions: int
    num_slots: int
    num_shards: int
    """Parts of the slots that are refilled on their own."""
    max_length: int
    prompt_length: int
    attention_blocks: BlockSizes
    """Sizes of blocks in the attention of prompts."""
    cache_parts: int
    """Parts of the slots' caches, each of which has a loop over its blocks."""

    def of_body(self, path: _Path, paths: Sequence[_Path], expected: Expected) -> Repeats | None:
        first, scope = path[0], path[-1].scope
        if scope in (ATTENTION, QUERY_BLOCKS, BLOCK_PAIRS):
            return self.of_prompts(path, paths)
        if scope == REFILLS:
            return Repeats("each refill", self.refills(expected))
        in_queue = first.scope == REFILLS
        if in_queue:
            decoded = self._in_queue(expected)
        elif first.scope == TOKENS:
            whole = next(each[0] for each in paths if each and each[0].scope == TOKENS)
            decoded = self._at_the_end(expected, fewer_slots=first != whole)
        else:
            return None
        if scope == CACHE_BLOCKS:
            # Each block costs the same, so the parts may share them equally.
            blocks = self.blocks(expected, in_queue=in_queue).times(1 / self.cache_parts)
            return Repeats("each block of keys", decoded.times.times(blocks))
        return decoded if scope == TOKENS else None

    def of_prompts(self, path: _Path, paths: Sequence[_Path]) -> Repeats:
        if path[-1].scope != ATTENTION:
            zeros = jnp.zeros((1, 1, self.prompt_length), jnp.int32)
            whole = Visible(zeros, zeros, zeros)
            return _of_blocks(path, paths, whole, self.attention_blocks, "prompts' ")
        queries, keys, _ = self.attention_blocks
        visible = np.arange(0, self.prompt_length, keys) < np.arange(
            queries, self.prompt_length + queries, queries
        ).clip(max=self.prompt_length).reshape(-1, 1)
        share = float(visible.mean())
        return Repeats("prompts' attention", Range(share, share))

    def _in_queue(self, expected: Expected) -> Repeats:
        turns = self.num_completions / self.num_slots - 1
        most = math.ceil(turns) * expected.longest_range(self.max_length).most
        return Repeats("each token in turn", Range(turns * expected.length, most))

    def refills(self, expected: Expected) -> Range:
        turns = self.num_completions / self.num_slots - 1
        at_least = refill_at_least(self.num_slots // self.num_shards)
        most = (self.num_completions - self.num_slots) / at_least
        return Range(turns, max(turns, min(most, self._in_queue(expected).times.most)))

    def _at_the_end(self, expected: Expected, *, fewer_slots: bool) -> Repeats:
        if fewer_slots:
            # It is faster: at best all completions end together, at worst nothing shrinks.
            return Repeats("each token in fewer slots", Range(0.0, 0.0))
        longest = expected.longest_range(self.max_length)
        # The longest may have been among the first that slots were given.
        least = longest.least if self.num_slots == self.num_completions else expected.length
        return Repeats("each token", Range(least, longest.most))

    def blocks(self, expected: Expected, *, in_queue: bool) -> Range:
        longest = expected.longest_range(self.max_length)
        if in_queue:
            most = math.ceil(longest.most / CACHE_BLOCK)
            return Range(_mean_blocks(expected.length, CACHE_BLOCK), most)
        # Each step reads as many blocks as the longest completion has.
        return Range(*(_mean_blocks(int(length), CACHE_BLOCK) for length in longest))

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def _mean_blocks(length: int, size: int) -> float:
    """Returns how many blocks a completion reads on average, of those of its first tokens."""
    return float(np.ceil(np.arange(1, length + 1) / size).mean())


@dataclasses.dataclass(frozen=True)
class Once(Trips):
    """A program without open loops."""

    def of_body(self, path: _Path, paths: Sequence[_Path], expected: Expected) -> Repeats | None:
        return None

    def to_json(self) -> dict[str, Any]:
        return {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turns(Trips):
    """The loops of a program of a session, in which completions have several turns.

    Replies are there when a turn ends, at both ends of a range: how long they take is not known. At
    best all slots decode at a time and all readers read; at worst decoding pauses for each few
    turns that end, and reads as often.
    """

    program: str
    decoding: Decoding
    num_readers: int
    """Slots that read at a time."""
    is_carried: bool = False
    """Whether completions go on in the next step, so that slots always have some."""

    def whole(self, expected: Expected) -> Repeats:
        if self.program == DECODE:
            return Repeats("each pause", self._pauses(expected))
        if self.program == EXTEND:
            return Repeats("each read", self._reads(expected))
        if self.program == REREAD:
            return Repeats("each read", self._rereads(expected))
        if self.program == ADMIT:
            return Repeats("each refill", self.decoding.refills(expected))
        return Repeats("once", ONCE)

    def of_body(self, path: _Path, paths: Sequence[_Path], expected: Expected) -> Repeats | None:
        scope = path[-1].scope
        if scope in (ATTENTION, QUERY_BLOCKS, BLOCK_PAIRS):
            return self.decoding.of_prompts(path, paths)
        if scope == TOKENS:
            return Repeats("each token", self._steps(expected))
        if scope not in (CACHE_BLOCKS, ROW_BLOCKS):
            return None
        times = {DECODE: self._steps, EXTEND: self._reads, REREAD: self._rereads}
        return self._blocks(scope, times[self.program](expected), expected)

    def _blocks(self, scope: str, times: Range, expected: Expected) -> Repeats:
        """Returns how often blocks of keys are read, of all rows together or row by row."""
        if scope == ROW_BLOCKS:
            size = blocks_of_row(cache_length_of(self.decoding.max_length)) * CACHE_BLOCK
            rows = self.decoding.num_slots / self.decoding.num_shards
            longest = expected.longest_range(self.decoding.max_length).most
            lengths = expected.length, int(longest)
            of_rows = Range(*(rows * _mean_blocks(length, size) for length in lengths))
            return Repeats("each read of a row's keys", times.times(of_rows))
        blocks = self.decoding.blocks(expected, in_queue=True)
        blocks = blocks.times(1 / self.decoding.cache_parts)
        return Repeats("each block of keys", times.times(blocks))

    def _steps(self, expected: Expected) -> Range:
        """Returns how many tokens a slot decodes, for one completion after the other."""
        rounds = self.decoding.num_completions / self.decoding.num_slots
        if self.is_carried:
            return Range(rounds * expected.drawn, rounds * expected.drawn)
        least, most = expected.longest_range(self.decoding.max_length)
        return Range(
            max(rounds * expected.drawn, least - expected.num_read),
            math.ceil(rounds) * (most - expected.num_read),
        )

    def _pauses(self, expected: Expected) -> Range:
        steps, turns = self._steps(expected), self.decoding.num_completions * expected.turns
        most = steps.most / MOST_STEPS + turns / self._pause_after
        return Range(math.ceil(steps.least / MOST_STEPS), min(most, steps.most))

    def _reads(self, expected: Expected) -> Range:
        of_all = self.decoding.num_completions * expected.reads
        fewest = min(self.num_readers, self._pause_after)
        return Range(of_all / self.num_readers, of_all / fewest)

    def _rereads(self, expected: Expected) -> Range:
        """Returns how often slots read what they carry over: on average half a completion."""
        reads = self.decoding.num_slots / self.num_readers / CARRIED_AT_ONCE
        most = expected.longest_range(self.decoding.max_length).most
        return Range(reads * expected.length / 2, reads * most / 2)

    @property
    def _pause_after(self) -> int:
        return refill_at_least(self.decoding.num_slots)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MicroBatches(Trips):
    """The loops of `score` and `update`: micro-batches, and the attention within them.

    All prompts have the planned length, and all completions the average.
    """

    rows: RowShape
    num_prompts: int
    num_generations: int
    prompt_length: int
    attention_blocks: BlockSizes
    """Sizes of blocks in attention."""

    def of_body(self, path: _Path, paths: Sequence[_Path], expected: Expected) -> Repeats | None:
        # What all micro-batches share, as everything is shared by a single one, has left the loop.
        packing = self._packing(expected.length)
        number = float(packing.number)
        if path[-1].scope == MICRO_BATCHES:
            return Repeats("each micro-batch", Range(number, number))
        if path[-1].scope == ATTENTION:
            share = float(self._meets(packing).mean())
            return Repeats("attention", Range(number * share, number * share))
        if path[-1].scope in (QUERY_BLOCKS, BLOCK_PAIRS):
            # Blocks are computed for all rows of a micro-batch, if any of them needs it.
            fields = _visible(packing, int(number) * self.rows.num_rows)
            shape = -1, self.rows.num_rows, self.rows.width
            visible = Visible(*(jnp.asarray(x.reshape(shape), jnp.int32) for x in fields))
            return _of_blocks(path, paths, visible, self.attention_blocks, "each ")
        return None

    def number(self, length: int) -> int:
        """Returns how many micro-batches a pass has, for completions of that length."""
        return int(self._packing(length).number)

    def _packing(self, length: int) -> Packing:
        lengths = np.full((self.num_prompts, self.num_generations), length)
        return Packing.plan(np.full(self.num_prompts, self.prompt_length), lengths, self.rows)

    def _meets(self, packing: Packing) -> Bool[np.ndarray, "rows i j"]:
        """Returns the pairs of blocks of which any query sees any key, in the rows in use."""
        fields = _visible(packing, int(packing.number) * self.rows.num_rows)
        queries, keys, _ = self.attention_blocks
        start = jnp.arange(0, self.rows.width, keys)
        sees = np.asarray(Visible(*map(jnp.asarray, fields)).sees(start, start + keys))
        return np.stack(
            [sees[:, at : at + queries].any(axis=1) for at in range(0, self.rows.width, queries)],
            axis=1,
        )

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def _of_blocks(
    path: _Path,
    paths: Sequence[_Path],
    visible: Visible,
    blocks: BlockSizes,
    prefix: str,
) -> Repeats:
    """Returns the repeats of a loop over blocks of queries, or of the loop over pairs in it.

    **Arguments:**

    - `path`: the path of the loop.
    - `paths`: the paths of the whole program, in order.
    - `visible`: the keys that are visible in each pass, `[passes, R, T]`.
    - `blocks`: the sizes of blocks.
    - `prefix`: words before the name of the body.
    """
    depth = next(i for i, loop in enumerate(path, 1) if loop.scope == QUERY_BLOCKS)
    counts = _block_counts(visible, blocks.queries, blocks.per_wide)
    # A pass has a loop for each width of blocks. No pass starts before the one before has ended.
    which = _blocked_loops(path[: depth - 1], paths).index(path[:depth]) % len(counts)
    of_pairs = len(path) > depth
    times = float(jnp.sum(counts[which].pairs if of_pairs else counts[which].queries))
    name = "pair of blocks" if of_pairs else "block of queries"
    wide = "wide " if which < len(counts) - 1 else ""
    return Repeats(prefix + wide + name, Range(times, times))


def _blocked_loops(parent: _Path, paths: Sequence[_Path]) -> list[_Path]:
    """Returns the paths of the loops over blocks of queries directly in a path, in order."""
    depth = len(parent) + 1
    inner = (each[:depth] for each in paths if len(each) >= depth and each[: depth - 1] == parent)
    return [each for each in dict.fromkeys(inner) if each[-1].scope == QUERY_BLOCKS]


@partial(jax.jit, static_argnames=("size", "per_wide"))
def _block_counts(visible: Visible, size: int, per_wide: int) -> list[BlockCounts]:
    return jax.lax.map(lambda x: BlockCounts.by_width(x, size, per_wide), visible)


def _visible(
    packing: Packing, number: int
) -> tuple[Int[np.ndarray, "rows W"], Int[np.ndarray, "rows W"], Int[np.ndarray, "rows W"]]:
    """Returns what each column of the first rows sees, as the fields of `Visible`."""
    width = packing.shape.width
    own = np.tile(np.arange(width), (number, 1))
    first, last = np.zeros_like(own), np.zeros_like(own)
    fields = (
        packing.completions, packing.lengths, packing.starts, packing.prompt_starts,
        packing.prompt_lengths,
    )  # fmt: skip
    in_use = (np.asarray(x).reshape(-1, packing.shape.places)[:number] for x in fields)
    places = zip(*in_use, strict=True)
    for row, place in enumerate(places):
        for completion, length, start, prompt, kept in zip(*place, strict=True):
            if completion >= 0:
                own[row, prompt : prompt + kept - 1] = prompt
                own[row, start : start + length] = start
                first[row, start : start + length] = prompt
                last[row, start : start + length] = prompt + kept - 1
    return own, first, last


def open_loops(loops: _Path) -> _Path:
    """Returns the loops whose number of trips the compiler does not know."""
    return tuple(loop for loop in loops if loop.trips is None)
