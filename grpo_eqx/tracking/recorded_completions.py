"""Search in the recorded completions of a run, which reads only the columns that it needs."""

import dataclasses
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from grpo_eqx.common.column_names import SHOWN_COLUMNS, TOKEN_COLUMNS
from grpo_eqx.common.errors import UserError
from grpo_eqx.tracking.checked_parquet import read_parquet
from grpo_eqx.tracking.recorded_run import RecordedRun

_LEAST_OF_AN_ID = 4
"""Fewest hex digits that are taken for the start of a prompt's id."""


class Match(NamedTuple):
    """Place of a completion in a run's tables, and the values that completions are sorted by."""

    step: int
    row: int
    reward: float
    prompt_id: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wanted:
    """Conditions on completions, all of which must hold."""

    first: int | None = None
    last: int | None = None
    """First and last step, both included."""
    min_reward: float | None = None
    max_reward: float | None = None
    truncated: bool = False
    text: re.Pattern[str] | None = None
    """Pattern to find in the completion."""
    prompt: str | None = None
    """Part of the prompt's text, or the start of its id."""


class RecordedCompletions:
    """Tables of a run's completions."""

    def __init__(self, run: RecordedRun, warn: Callable[[str], None]):
        """**Arguments:**

        - `run`: the run.
        - `warn`: called with a sentence on each unreadable table, which is then left out.

        Raises `UserError` if the run has no tables.
        """
        self._run, self._warn = run, warn
        self.tables = dict(run.completion_tables)
        if not self.tables:
            every = run.settings.get("log_completions_steps")
            why = (
                "it was made with log_completions_steps 0"
                if every == 0
                else "the first is written after the first step"
            )
            raise UserError(f"the run in {str(run.folder.path)!r} has no completions yet: {why}.")

    def find(self, wanted: Wanted) -> list[Match]:
        """Finds completions, by step and then in the order of their table.

        Raises `UserError` if there are none; the message has the ranges of the recorded values.
        """
        asked = {step: path for step, path in self.tables.items() if _is_within(step, wanted)}
        if not asked:
            raise UserError(
                f"there is no table of completions of these steps: the run has those of "
                f"{steps_in_words(self.tables)}."
            )
        found, seen, has_prompt = [], _Seen(), False
        for step in asked:
            table = self._columns(step, seen.columns(wanted))
            if table is None:
                continue
            if wanted.prompt is not None:
                has_prompt |= bool(_are_of_prompt(table, wanted.prompt).any())
            found += [
                Match(step, int(row), float(table["reward"][row]), table["prompt_id"][row])
                for row in _matching(table, wanted)
            ]
            seen.add(table, wanted.text)
        if not found:
            where = steps_in_words(asked)
            if not asked.keys() & self.tables.keys():
                raise UserError(f"no table of {where} can be read.")
            if wanted.prompt is not None and not has_prompt:
                raise UserError(
                    f"--prompt {wanted.prompt!r} is in no prompt of {where}, and no id begins with "
                    f"it ({_LEAST_OF_AN_ID} digits or more): leave out --prompt to see what there "
                    f"is."
                )
            raise UserError(f"no completion matches in {where}: {seen}.")
        return found

    def rows(self, matches: Sequence[Match], *, with_tokens: bool) -> Iterator[dict[str, Any]]:
        """Yields the columns of each match, in the order of `matches`.

        Reads a table once, when its first completion is due. Completions of unreadable tables are
        left out. Raises `UserError` if none is left.
        """
        places: dict[int, list[int]] = {}
        for match in matches:
            places.setdefault(match.step, []).append(match.row)
        unread = () if with_tokens else TOKEN_COLUMNS
        due: dict[int, deque[dict[str, Any]]] = {}
        for match in matches:
            if match.step not in due:
                table = self._table(match.step, SHOWN_COLUMNS, unread)
                rows = [] if table is None else table.take(places[match.step]).to_pylist()
                due[match.step] = deque(rows)
            if due[match.step]:
                yield due[match.step].popleft()
        if matches and not places.keys() & self.tables.keys():
            raise UserError("no table of these completions can be read.")

    def _columns(self, step: int, names: Sequence[str]) -> dict[str, Any] | None:
        """Returns columns of a table: numbers as arrays, and texts as lists."""
        import pyarrow as pa

        table = self._table(step, names)
        if table is None:
            return None
        return {
            name: column.to_pylist() if pa.types.is_string(column.type) else column.to_numpy()
            for name, column in zip(table.column_names, table.columns, strict=True)
        }

    def _table(
        self, step: int, needed: Sequence[str], unread: Sequence[str] | None = None
    ) -> Any | None:
        """Reads columns of a table: the `needed` ones, or with `unread`, all but the unread ones.

        For a table that is gone or damaged, or lacks a needed column, warns and returns `None`.
        """

        def choose(names: Sequence[str]) -> Sequence[str]:
            if missing := [name for name in needed if name not in names]:
                raise ValueError(
                    f"it has no column {missing[0]!r}: an earlier version of grpo_eqx wrote it"
                )
            return needed if unread is None else [x for x in names if x not in unread]

        path = self.tables.get(step)
        if path is None:
            return None
        try:
            table = read_parquet(path, choose)
            _check_types(table)
            return table
        except ValueError as error:
            del self.tables[step]
            self._warn(
                f"warning: the table {str(path)!r} cannot be read ({error}): its completions are "
                f"left out."
            )
            return None


def _check_types(table: Any) -> None:
    """Raises `ValueError` for a known column of a wrong type, or with missing values."""
    import pyarrow.types as kinds

    known = {
        kinds.is_integer: {"step", "length"},
        kinds.is_floating: {"reward", "advantage"},
        kinds.is_boolean: {"truncated"},
        kinds.is_string: {"prompt_id", "prompt", "completion"},
        kinds.is_list: {*TOKEN_COLUMNS},
    }
    for fits, names in known.items():
        for name in names & {*table.column_names}:
            column = table[name]
            if not fits(column.type) or (column.null_count and not kinds.is_floating(column.type)):
                raise ValueError(f"its column {name} holds {column.type}, or nothing in some rows")


class _Seen:
    """Ranges of the values that were searched, for the message that nothing matched."""

    def __init__(self) -> None:
        self.num_truncated = self.number = 0
        self.num_with_text: int | None = None
        self.low, self.high = np.inf, -np.inf

    def columns(self, wanted: Wanted) -> list[str]:
        """Returns the columns that the conditions need."""
        names = ["prompt_id", "reward", "truncated"]
        return (
            names
            + ["prompt"] * (wanted.prompt is not None)
            + ["completion"] * (wanted.text is not None)
        )

    def add(self, table: Mapping[str, Any], text: re.Pattern[str] | None) -> None:
        finite = table["reward"][np.isfinite(table["reward"])]
        self.low = min(self.low, finite.min(initial=np.inf))
        self.high = max(self.high, finite.max(initial=-np.inf))
        self.num_truncated += int(table["truncated"].sum())
        self.number += len(table["reward"])
        if text is not None:
            self.num_with_text = (self.num_with_text or 0) + int(_have(table, text).sum())

    def __str__(self) -> str:
        rewards = (
            f"rewards are from {self.low:g} to {self.high:g}"
            if self.low <= self.high
            else "none has a reward"
        )
        have = "" if self.num_with_text is None else f"{self.num_with_text:,} have the text, "
        return (
            f"of {self.number:,} completions, {have}{self.num_truncated:,} are truncated, and "
            f"{rewards}"
        )


def _matching(table: Mapping[str, Any], wanted: Wanted) -> np.ndarray:
    """Returns the rows that meet the conditions."""
    met = np.ones(len(table["reward"]), bool)
    if wanted.min_reward is not None:
        met &= table["reward"] >= wanted.min_reward
    if wanted.max_reward is not None:
        met &= table["reward"] <= wanted.max_reward
    if wanted.truncated:
        met &= table["truncated"]
    if wanted.prompt is not None:
        met &= _are_of_prompt(table, wanted.prompt)
    if wanted.text is not None:
        met &= _have(table, wanted.text)
    return np.flatnonzero(met)


def _have(table: Mapping[str, Any], text: re.Pattern[str]) -> np.ndarray:
    return np.array([text.search(each) is not None for each in table["completion"]], bool)


def _are_of_prompt(table: Mapping[str, Any], prompt: str) -> np.ndarray:
    is_id = len(prompt) >= _LEAST_OF_AN_ID
    pairs = zip(table["prompt_id"], table["prompt"], strict=True)
    return np.array(
        [prompt in text or (is_id and id_.startswith(prompt.lower())) for id_, text in pairs], bool
    )


def _is_within(step: int, wanted: Wanted) -> bool:
    return (wanted.first is None or step >= wanted.first) and (
        wanted.last is None or step <= wanted.last
    )


def steps_in_words(steps: Iterable[int]) -> str:
    """Names ascending steps by the first and the last."""
    numbers = list(steps)
    first, last = numbers[0], numbers[-1]
    return f"step {first}" if first == last else f"steps {first} to {last}"
