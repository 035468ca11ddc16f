"""Fenced blocks of the documentation's pages."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
_BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>[^\n]+) -->\n)?"
    r'^```(?P<language>\w+)(?: title="(?P<file>[\w./]+)")?\n(?P<text>.*?)^```$',
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    """A fenced block: a file where it has a name, else code, or commands with their output."""

    mark: str | None
    """Comment before it: what it needs, or which tests run it."""
    language: str
    file: str | None
    text: str


def blocks(page: Path) -> list[Block]:
    """Returns the fenced blocks of a page that are not in lists."""
    return [Block(**found.groupdict()) for found in _BLOCK.finditer(page.read_text())]
