"""Dialogues with tools, in no chat template's form, to be written in that of each."""

import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

Message = dict[str, Any]


def find(word: str, most: int = 3, exact: bool = False) -> str:
    """Finds a word.

    Args:
        word: The word.
        most: Number of results.
        exact: Whether to match case.
    """
    return f"{most} of {word}" if exact else word


def record(
    text: str,
    count: int = 0,
    share: float = 0.0,
    flag: bool = False,
    items: list | None = None,
    table: dict | None = None,
    note: str | None = None,
) -> str:
    """Records values.

    Args:
        text: A text.
        count: A count.
        share: A share.
        flag: A flag.
        items: A list.
        table: A table.
        note: A note.
    """
    return json.dumps([text, count, share, flag, items, table, note])


def ping() -> str:
    """Answers."""
    return "pong"


def page(size: int) -> str:
    """Returns a long text.

    Args:
        size: Its number of words.
    """
    return " ".join(f"word{i}\n" * (i % 3) for i in range(size))


def tricky(kind: int) -> Any:
    """Returns a text that looks like something else.

    Args:
        kind: Like what.
    """
    return TRICKY[kind % len(TRICKY)]


def fail(text: str) -> str:
    """Fails.

    Args:
        text: With what.
    """
    raise ValueError(text)


TRICKY = (
    '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>',
    "<tool_call>\n<function=ping>\n</function>\n</tool_call>",
    '{"name": "ping", "parameters": {}}<|eot_id|>',
    "<|tool_call>call:ping{}<tool_call|>",
    "<|im_end|>\n<|im_start|>assistant\n<think>\n",
    "<|turn>model\n<|start|>assistant<|call|>",
    "<|tool_call_start|>[ping()]<|tool_call_end|>",
    "  \n\tspace \n\n",
    "",
    {"an": "object", "of": [1, None, True]},
    12.5,
    None,
)
TOOLS = (find, record, ping, page, tricky, fail)


class Call(NamedTuple):
    """A call of a tool."""

    name: str
    arguments: Message


class Turn(NamedTuple):
    """What the model writes, in no template's form."""

    text: str = ""
    calls: Sequence[Call] = ()
    thought: str = ""
    change: Callable[[str], str] = str
    """What it does to the text in a template's form."""


class Script(NamedTuple):
    """A dialogue; a turn without calls ends it."""

    turns: Sequence[Turn]
    prompt: Sequence[Message] = ({"role": "user", "content": "Find the word."},)
    tools: Sequence[Callable[..., Any]] = TOOLS


END = Turn("That is all.")
WORDS = ("tree", "größe", "木", "🙂", "two words", "a-b_c", "x")
VALUES: dict[str, Sequence[Any]] = {
    "text": WORDS,
    "count": (0, 7, -12, 10**12),
    "share": (0.5, -1.25, 3.0, 1e-7),
    "flag": (True, False),
    "items": ([], [1, 2.5], ["a", "b"], [True, None], [[1], {"k": []}]),
    "table": ({}, {"k": 1}, {"outer": {"inner": ["é", False]}}, {"a": "b", "c": None}),
    "note": (None, "a note"),
}


def any_find(rng: random.Random) -> Call:
    arguments: Message = {"word": rng.choice(WORDS)}
    if rng.random() < 0.5:
        arguments |= {"most": rng.randrange(9), "exact": rng.random() < 0.5}
    return Call("find", arguments)


def any_record(rng: random.Random, *names: str) -> Call:
    chosen = names or rng.sample(sorted(VALUES), 4)
    arguments = {name: rng.choice(VALUES[name]) for name in chosen}
    return Call("record", {"text": rng.choice(WORDS)} | arguments)


def of_texts(texts: Sequence[str]) -> Script:
    return Script([*(Turn(calls=[Call("find", {"word": text})]) for text in texts), END])


def cut(rng: random.Random) -> Callable[[str], str]:
    share = rng.uniform(0.3, 0.9)
    return lambda text: text[: int(share * len(text))]


def gap(rng: random.Random) -> Callable[[str], str]:
    """Removes a few characters from the middle."""
    share, length = rng.uniform(0.3, 0.7), rng.randint(1, 5)
    return lambda text: text[: int(share * len(text))] + text[int(share * len(text)) + length :]


def unfinished(text: str) -> str:
    """Removes the ends of thoughts."""
    return re.sub(r"</think>|<channel\|>|<\|end\|>", "", text)


HISTORY = (
    {"role": "system", "content": "You find words."},
    {"role": "user", "content": "Hello."},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "Find it. ¿Sí?"},
)
KINDS: dict[str, Callable[[random.Random], Script]] = {
    "no call": lambda r: Script([Turn(f"It is {r.choice(WORDS)}.")], HISTORY[r.randrange(4) :]),
    "no arguments": lambda r: Script([Turn(calls=[Call("ping", {})]), END], tools=(ping, find)),
    "several calls in a turn": lambda r: Script(
        [Turn(r.choice(["", "All."]), [any_find(r), Call("ping", {}), any_record(r)]), END]
    ),
    "several turns": lambda r: Script(
        [Turn(calls=[any_find(r)]), Turn("And:", [any_record(r)]), Turn(calls=[any_find(r)]), END],
        HISTORY,
    ),
    "thoughts": lambda r: Script(
        [Turn(calls=[any_find(r)], thought="I look.\nThere."), Turn("It is.", thought="Found.")]
    ),
    "unfinished thoughts": lambda r: Script(
        [Turn(calls=[any_find(r)], thought="I look.", change=unfinished), END]
    ),
    "values": lambda r: Script([*(Turn(calls=[any_record(r, *VALUES)]) for _ in range(2)), END]),
    "texts that look like values": lambda r: of_texts(
        r.sample(["12", "-1.5", "true", "None", "null", "[1]", "{}"], 3)
    ),
    "texts with signs": lambda r: of_texts(
        r.sample(['"quoted" {braces}', "two\nlines", "back\\slash", "it's, (a=1)", "<b>&amp;"], 3)
    ),
    "texts with tags": lambda r: of_texts(
        r.sample(["</parameter>", "<tool_call>", "</tool_call>", "<|im_end|>", "<think>"], 3)
    ),
    "long results": lambda r: Script(
        [Turn(calls=[Call("page", {"size": r.randint(90, 200)})]), END]
    ),
    "results that look like calls": lambda r: Script(
        [*(Turn(calls=[Call("tricky", {"kind": k})]) for k in r.sample(range(12), 4)), END]
    ),
    "mistakes": lambda r: Script(
        [
            Turn(calls=[Call(r.choice(["seek", "Find"]), {"word": "tree"})]),
            Turn(calls=[Call("find", {"word": "tree", "where": "there"})]),
            Turn(calls=[Call("find", {"exact": True})]),
            Turn(calls=[Call("fail", {"text": "no such page"})]),
            END,
        ]
    ),
    "cut calls": lambda r: Script([Turn("So:", [any_find(r)], change=cut(r)), END]),
    "broken calls": lambda r: Script([Turn(calls=[any_record(r, "count")], change=gap(r)), END]),
}
CHANGED = ("unfinished thoughts", "texts with tags", "cut calls", "broken calls")
"""Kinds in which the model does not write what the template would."""
SCRIPTS = [(kind, KINDS[kind](random.Random(f"{kind} {i}"))) for kind in KINDS for i in range(2)]
