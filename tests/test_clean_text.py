"""Texts from outside cannot steer a terminal, in whatever way they reach it."""

import io

import pytest
from rich.table import Table
from rich.text import Text

from grpo_eqx.clean_text import clean
from grpo_eqx.errors import FileError, RunError, UserError
from grpo_eqx.tracking.run_console import safe_console

HOSTILE = "a\x1b[2Jb\x1b]0;title\x07\r\x9bc\u202ed\ud800 [red]é"
SHOWN = r"a\x1b[2Jb\x1b]0;title\x07\r\x9bc\u202ed\ud800 [red]é"


def test_what_cannot_be_printed_is_spelled() -> None:
    assert clean(HOSTILE) == SHOWN
    assert clean("two\nlines") == "two\nlines"
    assert clean("é", "ascii") == r"\xe9"


@pytest.mark.parametrize("kind", [UserError, RunError, FileError])
def test_errors_are_clean(kind: type[Exception]) -> None:
    assert str(kind(HOSTILE)) == SHOWN


def test_consoles_are_clean() -> None:
    hostile, shown = (
        text.replace(bell, "").replace(back, "")
        for text, bell, back in [(HOSTILE, "\x07", "\r"), (SHOWN, r"\x07", r"\r")]
    )  # which rich removes
    table = Table()
    table.add_column("x", no_wrap=True)
    table.add_row(hostile)
    out = io.StringIO()
    console = safe_console(file=out, width=200)
    for each in (hostile, Text(hostile), table):
        console.print(each)
    assert out.getvalue().count(shown) == 3
    assert all(char.isprintable() or char == "\n" for char in out.getvalue())
