"""Packing of a batch's completions, with their prompts, into rows of one shape."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Int

from grpo_eqx.training.micro_batches import RowShape


@dataclasses.dataclass(frozen=True)
class Packing:
    """Assignment of completions to the rows of micro-batches.

    A row holds a prompt, without its last token, and after it some of its completions, each of
    which begins with that token and ends before its own last one; then perhaps another prompt with
    some of its completions. Every array but `number` has a value for each of the `C` places for
    completions in each of the `R` rows of a micro-batch.
    """

    completions: Int[np.ndarray, "M R C"]
    """Index of the completion in the batch, one prompt's after the other's; -1 where the place is
    empty."""
    lengths: Int[np.ndarray, "M R C"]
    """Tokens of the completion."""
    starts: Int[np.ndarray, "M R C"]
    """Column of its first input."""
    prompt_starts: Int[np.ndarray, "M R C"]
    """Column of the first token of its prompt."""
    prompt_lengths: Int[np.ndarray, "M R C"]
    """Tokens of its prompt, the last included; 1 where there is no completion."""
    number: int
    """Micro-batches in use, the first ones: at most `M`."""
    num_completions: int
    """Completions of the batch, those without tokens included."""
    shape: RowShape

    @classmethod
    def plan(
        cls,
        prompt_lengths: Int[np.ndarray, " P"],
        lengths: Sequence[Sequence[int]] | Int[np.ndarray, "P G"],
        shape: RowShape,
    ) -> "Packing":
        """Plans rows for all completions that have tokens, in few micro-batches.

        **Arguments:**

        - `prompt_lengths`: tokens of each prompt.
        - `lengths`: tokens of each of its completions.
        - `shape`: shape of the rows. It has more micro-batches afterwards where there are more
          completions than it is for.

        Rows are dealt to devices such that all have about as many tokens.
        """
        groups, first = list[_Group](), 0
        for kept, each in zip(prompt_lengths - 1, lengths, strict=True):
            numbered = enumerate(map(int, each), first)
            groups.append(_Group(int(kept), sorted(numbered, key=lambda x: -x[1])))
            first += len(each)
        groups = sorted((x.without_empty() for x in groups), key=lambda x: -x.num_tokens)
        number = shape.least_micro_batches(
            num_tokens=sum(x.num_tokens for x in groups if x.completions),
            num_scored=sum(x.num_scored for x in groups),
            num_completions=sum(len(x.completions) for x in groups),
        )
        while (rows := _filled(groups, shape, number * shape.num_rows)) is None:
            assert (number - 1) * shape.num_rows < first, "a row holds any prompt and completion"
            number += 1
        while number > shape.most_micro_batches:  # few sizes, as each compiles programs
            shape = dataclasses.replace(shape, most_micro_batches=2 * shape.most_micro_batches)
        return cls._of(rows, number, first, shape)

    @classmethod
    def _of(cls, rows: "_Rows", number: int, num_completions: int, shape: RowShape) -> "Packing":
        arrays = np.zeros((5, shape.most_micro_batches * shape.num_rows, shape.places), np.int32)
        arrays[0], arrays[4] = -1, 1
        fullest_first = np.argsort(-rows.used, kind="stable")
        for dealt, row in zip(_dealt_rows(shape), fullest_first, strict=False):
            for c, held in enumerate(rows.held[row]):
                arrays[:, dealt, c] = (
                    held.number, held.length, held.start, held.prompt_start, held.prompt_length,
                )  # fmt: skip
        completions, lengths, starts, prompt_starts, prompt_lengths = arrays.reshape(
            5, shape.most_micro_batches, shape.num_rows, shape.places
        )
        return cls(
            completions, lengths, starts, prompt_starts, prompt_lengths,
            number, num_completions, shape,
        )  # fmt: skip

    @functools.cached_property
    def scored_starts(self) -> Int[np.ndarray, "M R C"]:
        """Start of each completion's tokens among those of its row that are scored."""
        return np.cumsum(self.lengths, axis=-1, dtype=np.int32) - self.lengths

    def num_tokens(self) -> Int[np.ndarray, "M R"]:
        """Counts the tokens in each row, a prompt's once for each row that it is in."""
        starts = np.where(self.completions < 0, -1, self.prompt_starts)
        ordered = np.sort(starts, axis=-1)
        order = np.argsort(starts, axis=-1, kind="stable")
        kept = np.take_along_axis(self.prompt_lengths - 1, order, axis=-1)
        is_first = np.diff(ordered, axis=-1, prepend=-1) != 0
        return self.lengths.sum(axis=-1) + (kept * is_first).sum(axis=-1)

    @property
    def padding_share(self) -> float:
        """Share of positions without a token, in the rows that are in use."""
        positions = self.number * self.shape.num_rows * self.shape.width
        return float(1 - self.num_tokens().sum() / positions)

    @property
    def balance(self) -> float:
        """Tokens of the average device, as a share of the tokens of the fullest."""
        by_device = self.num_tokens().reshape(len(self.completions), self.shape.num_shards, -1)
        totals = by_device.sum(axis=(0, 2))
        return float(totals.mean() / max(totals.max(), 1))


@dataclasses.dataclass(frozen=True)
class _Group:
    """A prompt, with the numbers and lengths of completions that have no row yet, longest first."""

    kept: int
    completions: list[tuple[int, int]]

    def without_empty(self) -> "_Group":
        return dataclasses.replace(self, completions=[x for x in self.completions if x[1] > 0])

    @property
    def num_scored(self) -> int:
        return sum(length for _, length in self.completions)

    @property
    def num_tokens(self) -> int:
        return self.kept + self.num_scored


@dataclasses.dataclass(frozen=True)
class _Held:
    """Completion that a row holds."""

    number: int
    length: int
    start: int
    prompt_start: int
    prompt_length: int


class _Rows:
    """Rows that are being filled; arrays have a value for each."""

    def __init__(self, shape: RowShape, number: int):
        self.shape = shape
        self.used = np.zeros(number, int)
        """Tokens."""
        self.scored = np.zeros(number, int)
        """Tokens of completions."""
        self.num_held = np.zeros(number, int)
        self.held: list[list[_Held]] = [[] for _ in range(number)]

    def choose(self, group: _Group) -> int | None:
        """Chooses the fullest row that takes the whole group, else the emptiest row.

        **Returns:** `None` where not even the group's shortest completion fits.
        """
        places = self.shape.places - self.num_held
        room = np.minimum(
            self.shape.width - self.used - group.kept, self.shape.num_scored - self.scored
        )
        room = np.where(places > 0, room, 0)
        takes_all = (room >= group.num_scored) & (places >= len(group.completions))
        if takes_all.any():
            return int(np.argmax(np.where(takes_all, self.used, -1)))
        row = int(np.argmax(room))
        return row if room[row] >= group.completions[-1][1] else None

    def add(self, row: int, group: _Group) -> _Group:
        """Adds the group's prompt and as many completions as fit; returns the group's rest."""
        used, scored, held, left = int(self.used[row]), int(self.scored[row]), self.held[row], []
        prompt_start, used = used, used + group.kept
        for number, length in group.completions:
            too_long = used + length > self.shape.width or scored + length > self.shape.num_scored
            if too_long or len(held) == self.shape.places:
                left.append((number, length))
                continue
            held.append(_Held(number, length, used, prompt_start, group.kept + 1))
            used += length
            scored += length
        self.used[row], self.scored[row], self.num_held[row] = used, scored, len(held)
        return dataclasses.replace(group, completions=left)


def _filled(groups: list[_Group], shape: RowShape, num_rows: int) -> _Rows | None:
    """Fills rows, with a whole group in one row where it fits; `None` if they do not suffice."""
    rows = _Rows(shape, num_rows)
    for each in groups:
        group = each
        while group.completions:
            row = rows.choose(group)
            if row is None:
                return None
            group = rows.add(row, group)
    return rows


def _dealt_rows(shape: RowShape) -> Iterator[int]:
    """Yields the indices of rows in the order in which they are dealt, back and forth."""
    shards, per_shard = shape.num_shards, shape.num_rows // shape.num_shards
    for turn in range(shape.most_micro_batches * per_shard):
        micro_batch, row = divmod(turn, per_shard)
        for shard in range(shards) if turn % 2 == 0 else reversed(range(shards)):
            yield micro_batch * shape.num_rows + shard * per_shard + row
