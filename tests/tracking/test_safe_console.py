"""Texts of models on a terminal: shown, and not obeyed."""

import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.text import Text

from grpo_eqx.tracking.safe_console import cut_in_the_middle, literal


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m", r"\x1b[31mred\x1b[0m"),
        ("\x9b31m", r"\x9b31m"),  # the same in one character
        ("a\rb\tc\x07\x00", r"a\rb\tc\x07\x00"),
        ("\u202egnirts\u202c \u2066x", r"\u202egnirts\u202c \u2066x"),
        ("[bold]markup[/] :smile: [link=http://x]y", "[bold]markup[/] :smile: [link=http://x]y"),
        ("שלום 漢字 é", "שלום 漢字 é"),
        ("half \ud800 of a pair", r"half \ud800 of a pair"),
        ("two\nlines", "two\nlines"),
    ],
)
def test_what_is_not_printable_is_spelled(text: str, shown: str) -> None:
    assert literal(text).plain == shown


def test_line_ends_can_be_spelled_too() -> None:
    assert literal("two\nlines", newlines=False).plain == r"two\nlines"


@given(st.text())
def test_nothing_else_reaches_the_output(text: str) -> None:
    assert all(char.isprintable() for char in literal(text, newlines=False).plain)
    assert literal(text, encoding="ascii").plain.isascii()


@given(st.text(min_size=1), st.integers(20, 60))
def test_a_long_text_keeps_its_start_and_its_end(text: str, most: int) -> None:
    whole = "start" + text * 20 + "end"
    cut = cut_in_the_middle(whole, most, functools.partial(literal, newlines=False)).plain
    assert len(cut) <= most
    assert cut[0] == "s"
    assert cut[-1] == "d"


def test_what_was_cut_is_counted() -> None:
    assert cut_in_the_middle("a" * 50 + "b" * 50, 30).plain == "aaaaaaa ...86 more... bbbbbbb"
    assert cut_in_the_middle("a" * 5000 + "b" * 5000, 30).plain == ("aaaaaa ...9,989 more... bbbbb")
    assert cut_in_the_middle("short", 30).plain == "short"


def test_of_a_long_text_only_the_ends_are_spelled_out() -> None:
    spelled: list[str] = []

    def spell(text: str) -> Text:
        spelled.append(text)
        return literal(text)

    cut_in_the_middle("x" * 1_000_000, 40, spell)
    assert sum(map(len, spelled)) <= 80
