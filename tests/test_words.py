"""Words of the documentation and of docstrings."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "grpo_eqx").rglob("*.py"))
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("devdocs/**/*.md")])

OPENING = re.compile(r"(Of|What|That|Those|By which|From what|In what|Whatever|For whom)\b")
"""Openings of a docstring that starts with neither a verb nor the noun that it describes."""

VOCABULARY = {
    r"(?:devices|TPUs) that are not there": "described devices",
    r"blazing|cutting.edge|effortless(?:ly)?|powerful|seamless(?:ly)?|state.of.the.art": "a fact",
    r"datasets?": "data set",
    r"e\.g\.": "for example",
    r"i\.e\.": "that is",
    r"hyper-?parameters?": "setting",
    r"in order to": "to",
    r"log ?probs?": "log-prob",
    r"utili[sz](?:e|ed|es|ing)": "use",
}
"""Phrases that are not used, and what to write in their place."""


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """The line and the text of each docstring, those of fields and constants included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text


def avoided(text: str) -> list[str]:
    """The phrases that are not used, in a text of Markdown without its code."""
    prose = re.sub(r"^ *```.*?^ *```|`[^`]*`|\]\([^)]*\)", "", text, flags=re.M | re.S)
    return [
        f"{found[0]!r}: write {instead!r}"
        for phrase, instead in VOCABULARY.items()
        for found in re.finditer(rf"(?<![\w-])(?:{phrase})(?![\w-])", prose, re.IGNORECASE)
    ]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_docstrings(path: Path) -> None:
    texts = list(docstrings(path))
    assert [f"line {line}: {text[:60]}" for line, text in texts if OPENING.match(text)] == []
    assert [f"line {line}: {words}" for line, text in texts for words in avoided(text)] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_pages(path: Path) -> None:
    assert avoided(path.read_text(encoding="utf-8")) == []
