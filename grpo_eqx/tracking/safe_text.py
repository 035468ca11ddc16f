"""Texts of models, made safe to print: a terminal shows what is in them, and obeys nothing."""

from collections.abc import Callable

from rich.text import Text

from grpo_eqx.common.clean_text import has, spelled

_ESCAPED, _CUT = "magenta", "cyan"


def literal(text: str, *, newlines: bool = True, encoding: str = "utf-8") -> Text:
    r"""Returns a text in which what cannot be printed is spelled as in Python: `\x1b`, `\u202e`.

    That includes escape sequences, and characters that turn the direction of writing. Markup of
    rich stays as it is.

    **Arguments:** the text; whether lines are broken where it breaks them, or `\n` is spelled; the
    encoding of the output.
    """
    shown = Text()
    for char in text:
        if has(encoding, char) or (newlines and char == "\n"):
            shown.append(char)
        else:
            shown.append(spelled(char), _ESCAPED)
    return shown


def cut_in_the_middle(text: str, most: int, show: Callable[[str], Text] = Text) -> Text:
    """Returns a text of at most `most` characters: where there are more, its start and its end.

    What was cut is counted in between.

    **Arguments:** the text; the limit; spells the text out, of which only the ends are asked for.
    """
    unread = max(0, len(text) - 2 * most)
    shown = Text.assemble(show(text[:most]), show(text[most + unread :]))
    number = len(shown) + unread
    if number <= most:
        return shown
    kept = max(2, most - len(_note(number)))
    tail = kept // 2
    return Text.assemble(
        shown[: kept - tail], (_note(number - kept), _CUT), shown[len(shown) - tail :]
    )


def _note(number: int) -> str:
    return f" ...{number:,} more... "
