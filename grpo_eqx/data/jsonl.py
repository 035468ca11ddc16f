"""Problems from a JSONL file: one `{"question": ..., "answer": ...}` per line."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import equinox as eqx

from grpo_eqx.data.prompts import Prompt, PromptSource
from grpo_eqx.errors import UserError

QUESTION, ANSWER = "question", "answer"


class Records(PromptSource):
    """Problems held in memory, from rows with a `question`, an `answer` and any other columns."""

    rows: Sequence[dict[str, Any]] = eqx.field(static=True)
    name: str

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < len(self.rows):
            raise IndexError(index)
        row = self.rows[index]
        return Prompt(row[QUESTION], {name: row[name] for name in row if name != QUESTION})

    def split(self, num_heldout: int) -> tuple["Records", "Records"]:
        """Returns these problems without the last `num_heldout`, and those."""
        cut = len(self.rows) - num_heldout
        return (
            Records(rows=self.rows[:cut], name=self.name),
            Records(rows=self.rows[cut:], name=f"the last {num_heldout:,} of {self.name}"),
        )


def read_jsonl(path: Path) -> Records:
    """Reads a JSONL file; raises `UserError` if unreadable, empty or (naming the line) invalid."""
    rows: dict[int, dict[str, Any]] = {}
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"data {str(path)!r} cannot be read: {error.strerror}.") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            rows[number] = _parse(line, path, number)
    if not rows:
        raise UserError(f"data {str(path)!r} is empty: it needs one JSON object per line.")
    columns = next(iter(rows.values())).keys()
    for number, row in rows.items():
        if row.keys() != columns:
            raise UserError(
                f"{path}, line {number}: the columns are {', '.join(sorted(row))}, but the "
                f"first problem has {', '.join(sorted(columns))}: give every problem the same "
                f"columns."
            )
    return Records(rows=list(rows.values()), name=path.name)


def _parse(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        row = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}, line {number}: not valid JSON ({error}).") from error
    if not isinstance(row, dict):
        raise UserError(f"{path}, line {number}: expected a JSON object, got {type(row).__name__}.")
    for name in (QUESTION, ANSWER):
        if name not in row:
            raise UserError(f"{path}, line {number}: the field {name!r} is missing.")
    if not isinstance(row[QUESTION], str) or not row[QUESTION].strip():
        raise UserError(f"{path}, line {number}: the field {QUESTION!r} must be non-empty text.")
    try:
        row[QUESTION].encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{path}, line {number}: the field {QUESTION!r} has an unpaired surrogate."
        ) from error
    return row
