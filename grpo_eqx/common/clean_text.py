"""Texts from outside, made safe to print: a terminal shows what is in them, and obeys nothing."""

import sys
import unicodedata
from typing import Any


def print_clean(text: str, *, file: Any = None, end: str = "\n") -> None:
    """Prints a text as `print` does, at once, with what cannot be printed spelled out.

    All that the package prints goes through here or through `safe_console`.
    """
    file = sys.stdout if file is None else file
    # A stream of the user's own may have nothing but `write`.
    encoding, can_flush = getattr(file, "encoding", None), hasattr(file, "flush")
    shown = clean(text, encoding) if isinstance(encoding, str) and encoding else clean(text)
    print(shown, file=file, end=end, flush=can_flush)


def clean(text: str, encoding: str = "utf-8") -> str:
    r"""Returns a text in which what cannot be printed is spelled as in Python: `\x1b`, `\u202e`.

    That includes escape sequences, and characters that turn the direction of writing. Line breaks,
    tabs, spaces of all kinds and joiners, as in emoji, stay. **Arguments:** the text; the encoding
    of the output, in whose place an unknown one is UTF-8.
    """
    if text.isprintable() and (encoding == "utf-8" or text.isascii()):
        return text
    stays = {char: _is_harmless(char) and _encodes(encoding, char) for char in set(text)}
    return "".join(char if stays[char] else spelled(char) for char in text)


def is_name(value: object) -> bool:
    """Returns whether a value can name a metric: a text that shows as it is wherever it is read."""
    return isinstance(value, str) and bool(value.strip()) and value.isprintable()


def has(encoding: str, char: str) -> bool:
    """Returns whether a character can be printed, in an encoding."""
    return char.isprintable() and _encodes(encoding, char)


def spelled(char: str) -> str:
    r"""Returns how Python writes a character that cannot be printed, such as `\x1b`."""
    if char == "\x7f":
        return r"\u007f"  # as JSON does too, whose writers leave this one alone
    return char.encode("unicode_escape", "surrogatepass").decode()


def _is_harmless(char: str) -> bool:
    """Returns whether a character steers no terminal."""
    return char.isprintable() or char in "\n\t\u200d" or unicodedata.category(char) == "Zs"


def _encodes(encoding: str, char: str) -> bool:
    try:
        char.encode(encoding)
    except UnicodeError:
        return False
    except (LookupError, ValueError):  # a stream of the user's own may have any
        return _encodes("utf-8", char)
    return True
