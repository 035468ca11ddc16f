"""Texts from outside, made safe to print: a terminal shows what is in them, and obeys nothing."""


def clean(text: str, encoding: str = "utf-8") -> str:
    r"""Returns a text in which what cannot be printed is spelled as in Python: `\x1b`, `\u202e`.

    That includes escape sequences, and characters that turn the direction of writing. Line breaks
    stay. **Arguments:** the text; the encoding of the output.
    """
    if text.isprintable() and (encoding == "utf-8" or text.isascii()):
        return text
    return "".join(char if char == "\n" or has(encoding, char) else spelled(char) for char in text)


def has(encoding: str, char: str) -> bool:
    """Returns whether a character can be printed, in an encoding."""
    try:
        char.encode(encoding)
    except UnicodeEncodeError:
        return False
    return char.isprintable()


def spelled(char: str) -> str:
    r"""Returns how Python writes a character that cannot be printed, such as `\x1b`."""
    return char.encode("unicode_escape", "surrogatepass").decode()
