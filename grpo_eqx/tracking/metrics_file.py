"""Reading of `metrics.jsonl`, and what is damaged or missing in it."""

import itertools
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, SupportsFloat

from grpo_eqx.common.errors import FileError, listed
from grpo_eqx.common.read_files import object_of, read_bytes

_START = b'{"step": '
"""Beginning of each line. A killed run may have written only a part of its last line."""
_MOST_NAMED = 5


def is_of_step(metrics: Mapping[str, SupportsFloat]) -> bool:
    """Returns whether metrics are those of a training step rather than of an evaluation."""
    return "step_time" in metrics


class Metrics(NamedTuple):
    """Readable part of a metrics file."""

    rows: Sequence[Mapping[str, float]]
    """Metrics of steps and evaluations, sorted by step, with NaN for null. Of repeated lines, the
    last counts."""
    lines: Sequence[bytes]
    """The lines that `rows` were read from."""
    damaged: Sequence[int]
    """Numbers, from 1, of the other lines: unreadable, or repeated later."""

    @classmethod
    def read(cls, path: Path, last: int | None = None) -> "Metrics":
        """Reads the lines of steps up to `last`; a missing file has no lines.

        A cut-off last line is ignored: a run is writing it, or was killed while it did. Raises
        `FileError` if the file as a whole cannot be read.
        """
        if not os.path.lexists(path):
            return cls((), (), ())
        *lines, end = read_bytes(path).split(b"\n")
        if not (_START.startswith(end[: len(_START)]) and _row_of(end) is None):
            lines.append(end)
        found: dict[Any, tuple[int, Mapping[str, float]]] = {}
        for number, line in enumerate(lines):
            row = _row_of(line)
            if row is not None:
                names = None if is_of_step(row) else frozenset(row)
                found[row["step"], names] = number, row
        numbers = {number for number, _ in found.values()}
        newest = math.inf if last is None else last
        kept = sorted(
            ((row, lines[number]) for number, row in found.values() if row["step"] <= newest),
            key=lambda each: each[0]["step"],
        )
        damaged = [i for i, x in enumerate(lines, 1) if x.strip() and i - 1 not in numbers]
        return cls([row for row, _ in kept], [line for _, line in kept], damaged)

    @property
    def steps(self) -> list[Mapping[str, float]]:
        """The metrics of each step."""
        return [row for row in self.rows if is_of_step(row)]

    @property
    def evaluations(self) -> list[Mapping[str, float]]:
        """The metrics of each evaluation; `step` is the step after which it was made."""
        return [row for row in self.rows if not is_of_step(row)]

    def gaps(self, name: str, *, first: int | None, last: int | None = None) -> str | None:
        """Says which lines are damaged and which steps are missing; `None` for a complete file.

        **Arguments:**

        - `name`: the name of the file.
        - `first`, `last`: the first and the last step of the run, by default those in the file.
        """
        present = sorted(int(row["step"]) for row in self.steps)
        first = min(present, default=1) if first is None else first
        last = max(present, default=0) if last is None else last
        bounds = [first - 1, *(x for x in present if first <= x <= last), last + 1]
        missing = [(x + 1, y - 1) for x, y in itertools.pairwise(bounds) if y - x > 1]
        said = []
        if self.damaged:
            number = len(self.damaged)
            lines = "1 line that is" if number == 1 else f"{number:,} lines that are"
            said.append(f"{lines} damaged or repeated ({_some(_ranges(self.damaged))})")
        if missing:
            number = sum(high - low + 1 for low, high in missing)
            said.append(f"no line of {number:,} of {last:,} steps ({_some(missing)})")
        return f"{name} has {listed(said)}" if said else None


def _row_of(line: bytes) -> dict[str, float] | None:
    """Returns the metrics of a line, with NaN for null; `None` for a damaged line."""
    try:
        found = object_of(line, "")
        row = {name: math.nan if x is None else _number(x) for name, x in found.items()}
    except (FileError, OverflowError, TypeError):
        return None
    step = row.get("step", math.nan)
    return row if step >= 0 and step.is_integer() else None


def _number(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError("metrics are numbers")
    return float(value)


def _ranges(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Returns the runs of consecutive numbers, each by its first and last; the numbers ascend."""
    ranges: list[tuple[int, int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1] = ranges[-1][0], number
        else:
            ranges.append((number, number))
    return ranges


def _some(ranges: Sequence[tuple[int, int]]) -> str:
    """Lists ranges of numbers in words, of many only the first."""
    named = [f"{x}" if x == y else f"{x} to {y}" for x, y in ranges[:_MOST_NAMED]]
    return ", ".join(named) + (", ..." if len(ranges) > _MOST_NAMED else "")
