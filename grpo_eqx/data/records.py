"""Problems from rows with named columns, such as the rows of data sets, JSONL files and lists."""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from grpo_eqx.common.errors import UserError
from grpo_eqx.common.plain_data import brief, why_not_plain
from grpo_eqx.data.prompts import Conversation, Prompt, PromptSource

QUESTION, PROMPT = "question", "prompt"
_ROLES = "system", "user", "assistant", "tool"


@dataclasses.dataclass(eq=False)
class Records(PromptSource):
    """Problems held in memory, from rows with a column `prompt` or `question`.

    A `question` is the user's message. A `prompt` is as in TRL: a conversation, or a text that the
    model continues without a chat template. If a row has both, `question` is an ordinary column; if
    it has neither, an environment makes its prompt. Reward functions receive the other columns.
    """

    rows: Sequence[Mapping[str, Any]]
    name: str = ""

    @classmethod
    def of(
        cls, rows: Iterable[tuple[str, Any]], name: str, *, needs_prompt: bool = True
    ) -> "Records":
        """Checks rows and returns them as problems.

        **Arguments:**

        - `rows`: pairs of the place of a row, for messages, and the row.
        - `name`: name of the source.
        - `needs_prompt`: whether rows must have a question or a prompt.

        Raises `UserError` for a row that is not a problem, or has other columns than the first row.
        """
        found: list[Mapping[str, Any]] = []
        for where, row in rows:
            if not isinstance(row, Mapping):
                raise UserError(
                    f"{where} is of type {type(row).__name__}: give an object (a dict) with a "
                    f"{QUESTION} or a {PROMPT}."
                )
            _check_columns(where, row, found[0] if found else row, needs_prompt=needs_prompt)
            if QUESTION in row or PROMPT in row:
                _check_content(where, row, found[0] if found else row)
            if (fault := why_not_plain(row)) is not None:
                raise UserError(f"{where} {fault}.")
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
        if column not in row:
            return Prompt("", columns)
        plain = column == PROMPT and isinstance(row[PROMPT], str)
        return Prompt(row[column], columns, plain)


GivenPrompt = str | Conversation | Mapping[str, Any] | Prompt
"""A text, a conversation, a row of data, or a prompt."""


def as_prompts(
    given: Iterable[GivenPrompt], *, plain: bool, needs_prompt: bool = True
) -> list[Prompt]:
    """Returns texts, conversations, rows of data or prompts as prompts.

    **Arguments:**

    - `given`: the user's prompts.
    - `plain`: whether the model continues a text, rather than answering it as a question.
    - `needs_prompt`: whether rows must have a question or a prompt.

    Raises `UserError` for anything else.
    """
    try:
        contents = None if isinstance(given, str | Mapping | Prompt) else list(given)
    except TypeError:
        contents = None
    if contents and all(isinstance(each, Mapping) and "role" in each for each in contents):
        raise UserError(
            "the prompts are the messages of one conversation: pass a list of conversations, as in "
            "generate([messages])."
        )
    if contents is None:
        raise UserError(
            f"the prompts are {brief(given)}: pass a list of texts or conversations, as in "
            f"generate(['What is 2 + 2?'])."
        )
    text = PROMPT if plain else QUESTION
    return [
        _as_prompt(f"prompt {i}", each, text, needs_prompt=needs_prompt)
        for i, each in enumerate(contents, start=1)
    ]


def _as_prompt(where: str, given: GivenPrompt, text: str, *, needs_prompt: bool) -> Prompt:
    """Returns one prompt; `text` is the column that a text belongs to."""
    if isinstance(given, Prompt):
        column = PROMPT if given.plain or not isinstance(given.content, str) else QUESTION
        Records.of([(where, {column: given.content})], "")  # for its checks
        return given
    if not isinstance(given, Mapping):
        given = {text if isinstance(given, str) else PROMPT: given}
    return Records.of([(where, given)], "", needs_prompt=needs_prompt)[0]


def is_list_of_rows(value: Any) -> bool:
    """Returns whether a value is a list of rows rather than of messages."""
    return (
        isinstance(value, list)
        and bool(value)
        and isinstance(value[0], Mapping)
        and "role" not in value[0]
    )


def _content_column(row: Mapping[str, Any]) -> str:
    return PROMPT if PROMPT in row else QUESTION


def _check_columns(
    where: str, row: Mapping[str, Any], first: Mapping[str, Any], *, needs_prompt: bool
) -> None:
    names = ", ".join(sorted(map(str, row)))
    keys: list[Any] = list(row)
    if nameless := [name for name in keys if not isinstance(name, str)]:
        raise UserError(
            f"{where} has a column named {brief(nameless[0])}: give it a name that is text."
        )
    if needs_prompt and QUESTION not in row and PROMPT not in row:
        has = f"only {names}" if row else "none at all"
        raise UserError(
            f"{where} has no column {QUESTION} or {PROMPT}, {has}: {_without_content(row)}."
        )
    if row.keys() != first.keys():
        raise UserError(
            f"{where} has the columns {names}, but the first problem has "
            f"{', '.join(sorted(map(str, first)))}: give every problem the same columns."
        )


def _without_content(row: Mapping[str, Any]) -> str:
    """Returns the fix for a row without `question` or `prompt`, as a clause."""
    if {"chosen", "rejected"} <= row.keys():
        return (
            f"these are preference pairs, and GRPO samples its own completions: make a column "
            f"{PROMPT} of the messages before the answers"
        )
    if "input_ids" in row:
        return f"these are tokens: give problems as text, in a column {QUESTION} or {PROMPT}"
    if len(row) == 1 and (mark := next((x for x in ";\t|" if x in next(iter(row))), None)):
        return f"this is one column: read the file with the delimiter {mark!r}"
    instead = "rename the column that the model is to answer"
    for name, value in row.items():
        if isinstance(value, list) and value and isinstance(value[0], Mapping):
            instead = (
                f"rename {name} to {PROMPT}, and make it a list of objects with role (system, "
                f"user or assistant) and content, which ends with the user's message"
            )
            if "role" in value[0]:
                instead = f"rename {name} to {PROMPT}"
                if isinstance(value[-1], Mapping) and value[-1].get("role") == "assistant":
                    instead += (
                        ", without the assistant's last message, which is for the model to "
                        "write; what rewards compare with goes into a column such as answer"
                    )
    return instead


def _check_content(where: str, row: Mapping[str, Any], first: Mapping[str, Any]) -> None:
    """Rejects a row whose problem is neither text nor a conversation that the model can answer."""
    column = _content_column(row)
    content = row[column]
    if isinstance(content, str):
        text = content
    elif column == PROMPT and isinstance(content, Sequence) and content:
        text = last_of_user(where, content)
    else:
        raise UserError(f"{where}: {column} is {brief(content)}: {_wanted(column, content)}.")
    if _is_text_of_messages(text):
        raise UserError(
            f"{where}: {column} is the JSON text of a list of messages: make it a list, as "
            f"json.loads does, in the column {PROMPT}."
        )
    if not text.strip():
        raise UserError(f"{where}: {column} is {brief(content)}: it must be non-empty text.")
    if isinstance(content, str) != isinstance(first[column], str):
        kind, others = ("a text", "is a conversation")
        if not isinstance(content, str):
            kind, others = "a conversation", "is a text"
        raise UserError(
            f"{where}: {column} is {kind}, but that of the first problem {others}: give every "
            f"problem the same kind."
        )


def _is_text_of_messages(text: str) -> bool:
    """Returns whether a text is a conversation in JSON or Python syntax, as in CSV files."""
    return re.match(r"\s*\[\s*\{\s*['\"](role|content)['\"]\s*:", text) is not None


def _wanted(column: str, content: Any) -> str:
    """Returns the fix for a content that is neither text nor messages."""
    if hasattr(content, "tolist"):
        return "make it a list of messages, as its method tolist does"
    if isinstance(content, Mapping):
        return f"put the message into a list, in the column {PROMPT}"
    if isinstance(content, list | tuple) and content:
        return f"it must be non-empty text; name the column {PROMPT} for a list of messages"
    return "it must be non-empty text" + (", or a list of messages" if column == PROMPT else "")


def last_of_user(where: str, conversation: Sequence[Any]) -> str:
    """Returns the text that the model answers; rejects messages that no template expects."""
    for message in conversation:
        if not is_message(message):
            parts = isinstance(message, Mapping) and isinstance(message.get("content"), list)
            more = "; images and other parts are not supported" if parts else ""
            raise UserError(
                f"{where}: {PROMPT} has the message {brief(message)}: give messages as objects "
                f"with role and content, both text{more}."
            )
        if message["role"] not in _ROLES:
            raise UserError(
                f"{where}: {PROMPT} has a message of the role {message['role']!r}: use one of "
                f"{', '.join(_ROLES)}."
            )
    last = conversation[-1]
    if last["role"] not in ("user", "tool"):
        raise UserError(
            f"{where}: the conversation in {PROMPT} ends with the {last['role']}'s message: end it "
            f"with the user's."
        )
    return str(last["content"])


def is_message(message: Any) -> bool:
    """Returns whether a message has a role, and content or calls of tools, as templates expect."""
    if not isinstance(message, Mapping):
        return False
    content = message.get("content")
    has_content = isinstance(content, str) or (content is None and bool(message.get("tool_calls")))
    return has_content and isinstance(message.get("role"), str)
