"""Texts of models, made safe to print: a terminal shows what is in them, and obeys nothing."""

from rich.text import Text

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
        if (char.isprintable() and _has(encoding, char)) or (newlines and char == "\n"):
            shown.append(char)
        else:
            shown.append(char.encode("unicode_escape", "surrogatepass").decode(), _ESCAPED)
    return shown


def cut_in_the_middle(text: Text, most: int) -> Text:
    """Returns a text of at most `most` characters: where there are more, its start and its end.

    What was cut is counted in between.
    """
    if len(text) <= most:
        return text
    kept = max(2, most - len(_note(len(text))))
    tail = kept // 2
    return Text.assemble(
        text[: kept - tail], (_note(len(text) - kept), _CUT), text[len(text) - tail :]
    )


def _note(number: int) -> str:
    return f" ...{number:,} more... "


def _has(encoding: str, char: str) -> bool:
    try:
        char.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True
