"""Texts from outside, made safe to print: a terminal shows what is in them, and obeys nothing."""

import sys
from typing import Any


def print_clean(text: str, *, file: Any = None, end: str = "\n") -> None:
    """Prints a text as `print` does, at once, with what cannot be printed spelled out.

    All that the package prints goes through here or through `safe_console`.
    """
    file = sys.stdout if file is None else file
    encoding = getattr(file, "encoding", None) or "utf-8"  # of a stream of the user's own
    print(clean(text, encoding), file=file, end=end, flush=True)


def clean(text: str, encoding: str = "utf-8") -> str:
    r"""Returns a text in which what cannot be printed is spelled as in Python: `\x1b`, `\u202e`.

    That includes escape sequences, and characters that turn the direction of writing. Line breaks
    stay. **Arguments:** the text; the encoding of the output.
    """
    if text.isprintable() and (encoding == "utf-8" or text.isascii()):
        return text
    stays = {char: char == "\n" or has(encoding, char) for char in set(text)}
    return "".join(char if stays[char] else spelled(char) for char in text)


def is_name(value: object) -> bool:
    """Returns whether a value can name a metric: a text that shows as it is wherever it is read."""
    return isinstance(value, str) and bool(value.strip()) and value.isprintable()


def has(encoding: str, char: str) -> bool:
    """Returns whether a character can be printed, in an encoding."""
    try:
        char.encode(encoding)
    except UnicodeEncodeError:
        return False
    return char.isprintable()


def spelled(char: str) -> str:
    r"""Returns how Python writes a character that cannot be printed, such as `\x1b`."""
    if char == "\x7f":
        return r"\u007f"  # as JSON does too, whose writers leave this one alone
    return char.encode("unicode_escape", "surrogatepass").decode()
