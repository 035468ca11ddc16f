"""Fenced blocks of the documentation's pages, and the commands in them."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
_BLOCK = re.compile(
    r"(?:^ *<!-- (?P<mark>[^\n]+) -->\n)?"
    r'^(?P<indent> *)```(?P<language>\w+)(?: title="(?P<file>[\w./]+)")?\n'
    r"(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    """A fenced block: a file where it has a name, else code, or commands with their output."""

    mark: str | None
    """Comment before it: what it needs, or which tests run it."""
    language: str
    file: str | None
    text: str


class Command(NamedTuple):
    """A command of a page, and the output that the page shows."""

    line: str
    shown: list[str]


def blocks(page: Path) -> list[Block]:
    """Returns the fenced blocks of a page, those in lists without their indentation."""
    found = _BLOCK.finditer(page.read_text())
    return [Block(x["mark"], x["language"], x["file"], _unindented(x)) for x in found]


def _unindented(block: re.Match[str]) -> str:
    return re.sub(rf"^{block['indent']}", "", block["text"], flags=re.MULTILINE)


def commands(block: Block) -> list[Command]:
    """Splits a console block at its prompts.

    A further line of a command begins with `> `, or follows a backslash.
    """
    parts = re.split(r"^\$ ", block.text, flags=re.MULTILINE)
    assert not parts[0], "output before the first command"
    found = []
    for part in parts[1:]:
        first, *rest = part.splitlines()
        while rest and (rest[0].startswith("> ") or first.endswith("\\")):
            first += "\n" + rest.pop(0).removeprefix("> ")
        found.append(Command(first, rest))
    return found
