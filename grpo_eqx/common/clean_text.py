"""Texts from outside, made safe to print: a terminal shows their contents, and obeys nothing."""

import sys
import unicodedata
from typing import Any


def print_clean(text: str, *, file: Any = None, end: str = "\n") -> None:
    """Prints a text at once, with unprintable characters spelled out.

    Everything that the package prints goes through this function or through `safe_console`.
    """
    file = sys.stdout if file is None else file
    # A user's stream may have no other method than `write`.
    encoding, can_flush = getattr(file, "encoding", None), hasattr(file, "flush")
    shown = clean(text, encoding) if isinstance(encoding, str) and encoding else clean(text)
    print(shown, file=file, end=end, flush=can_flush)


def clean(text: str, encoding: str = "utf-8") -> str:
    r"""Returns a text whose unprintable characters are spelled as in Python: `\x1b`, `\u202e`.

    Spells escape sequences, and characters that turn the direction of writing. Keeps line breaks,
    tabs, all kinds of spaces, and joiners, as in emoji.

    **Arguments:**

    - `text`: the text.
    - `encoding`: encoding of the output. UTF-8 replaces an unknown one.
    """
    if text.isprintable() and (encoding == "utf-8" or text.isascii()):
        return text
    stays = {char: _is_harmless(char) and _encodes(encoding, char) for char in set(text)}
    return "".join(char if stays[char] else spelled(char) for char in text)


def is_name(value: object) -> bool:
    """Returns whether a value can name a metric: a printable text that is not empty."""
    return isinstance(value, str) and bool(value.strip()) and value.isprintable()


def has(encoding: str, char: str) -> bool:
    """Returns whether a character is printable in an encoding."""
    return char.isprintable() and _encodes(encoding, char)


def spelled(char: str) -> str:
    r"""Returns Python's spelling of an unprintable character, such as `\x1b`."""
    if char == "\x7f":
        return r"\u007f"  # valid in JSON, too, whose writers leave this character unchanged
    return char.encode("unicode_escape", "surrogatepass").decode()


def _is_harmless(char: str) -> bool:
    """Returns whether a character cannot steer a terminal."""
    return char.isprintable() or char in "\n\t\u200d" or unicodedata.category(char) == "Zs"


def _encodes(encoding: str, char: str) -> bool:
    try:
        char.encode(encoding)
    except UnicodeError:
        return False
    except (LookupError, ValueError):  # a user's stream may have any encoding
        return _encodes("utf-8", char)
    return True
