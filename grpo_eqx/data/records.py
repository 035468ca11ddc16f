"""Problems from rows with named columns, as data sets, JSONL files and lists have them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import equinox as eqx

from grpo_eqx.data.prompts import Prompt, PromptSource
from grpo_eqx.errors import UserError

QUESTION, PROMPT = "question", "prompt"
_ROLES = "role", "content"


class Records(PromptSource):
    """Problems held in memory, from rows with a column `prompt` or `question`.

    A `question` is the user's message. A `prompt` is as in TRL: a conversation, or a text that the
    model continues without a chat template; beside it, `question` is a column like any other.
    Reward functions receive the other columns.
    """

    rows: Sequence[Mapping[str, Any]] = eqx.field(static=True)
    name: str

    @classmethod
    def of(cls, rows: Iterable[tuple[str, Any]], name: str) -> "Records":
        """Checks rows, each with the words for where it is.

        Raises `UserError`, saying where, for a row that is no problem, or has other columns than
        the first.
        """
        found: list[Mapping[str, Any]] = []
        for where, row in rows:
            if not isinstance(row, Mapping):
                raise UserError(
                    f"{where} is of type {type(row).__name__}: give an object (a dict) with a "
                    f"{QUESTION} or a {PROMPT}."
                )
            _check_columns(where, row, found[0] if found else row)
            _check_content(where, row)
            found.append(row)
        return cls(rows=found, name=name)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < len(self.rows):
            raise IndexError(index)
        row = self.rows[index]
        column = _content_column(row)
        columns = {name: row[name] for name in row if name != column}
        plain = column == PROMPT and isinstance(row[PROMPT], str)
        return Prompt(row[column], columns, plain)


def _content_column(row: Mapping[str, Any]) -> str:
    return PROMPT if PROMPT in row else QUESTION


def _check_columns(where: str, row: Mapping[str, Any], first: Mapping[str, Any]) -> None:
    names = ", ".join(sorted(map(str, row)))
    if QUESTION not in row and PROMPT not in row:
        has = f"only {names}" if row else "none at all"
        raise UserError(
            f"{where} has no column {QUESTION} or {PROMPT}, {has}: rename the column that the "
            f"model is to answer."
        )
    if row.keys() != first.keys():
        raise UserError(
            f"{where} has the columns {names}, but the first problem has "
            f"{', '.join(sorted(map(str, first)))}: give every problem the same columns."
        )


def _check_content(where: str, row: Mapping[str, Any]) -> None:
    """Refuses a row whose problem is no text, or no conversation that the model can answer."""
    column = _content_column(row)
    content = row[column]
    texts = [content]
    if column == PROMPT and isinstance(content, Sequence) and not isinstance(content, str):
        texts = [_message_text(where, message) for message in content][-1:] or [None]
        if content and content[-1]["role"] == "assistant":
            raise UserError(
                f"{where}: the conversation in {PROMPT} ends with the assistant's message: end it "
                f"with the user's."
            )
    for text in texts:
        if not isinstance(text, str) or not text.strip():
            raise UserError(f"{where}: {column} is {_brief(content)}: it must be non-empty text.")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"{where}: {column} has an unpaired surrogate.") from error


def _message_text(where: str, message: Any) -> str:
    fields = [message.get(name) for name in _ROLES] if isinstance(message, Mapping) else [None]
    if not all(isinstance(field, str) for field in fields):
        raise UserError(
            f"{where}: {PROMPT} has the message {_brief(message)}: give messages as objects with "
            f"role and content, both text."
        )
    return str(fields[1])


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
