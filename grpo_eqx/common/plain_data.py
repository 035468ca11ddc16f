"""Plain data: what JSON can hold, and fields of the types that their reader expects."""

import sys
from collections.abc import Mapping, Sequence
from types import EllipsisType
from typing import Any, TypeVar

from grpo_eqx.common.errors import FileError

T = TypeVar("T")
DEEPEST = 100
"""Levels of lists and objects within one another: more would reach Python's limit of recursion."""
_MOST_VALUES = 2_000_000
_MOST_BITS = 14_000
"""Bits of an integer that Python can write in its 4,300 digits."""
_QUOTED = 60
"""Characters of a value that a message quotes."""
_WORDS: Mapping[type, str] = {
    bool: "true or false", int: "a whole number", float: "a number", str: "a text",
    list: "a list", dict: "an object with names",
}  # fmt: skip


def brief(value: Any, most: int = _QUOTED) -> str:
    """Returns a value as Python writes it, cut after some characters, for messages.

    Never fails: what cannot be written is named by its type.
    """
    try:
        text = repr(value)
    except Exception:  # of an object of the user's, too deep, or too long a number
        return f"of the type {type(value).__name__}"
    return text if len(text) <= most else f"{text[:most]}..."


def why_not_plain(value: Any) -> str | None:
    """Returns why a value is not plain data, as a clause with the fix; `None` where it is.

    Lists, tuples and mappings are looked into, and objects of other types are passed over. Refused
    are names that are not texts, halves of characters, whole numbers that Python cannot write, and
    values that are nested too deeply, contain themselves or are too many.
    """
    left, number = [(value, 0)], 0
    while left:
        each, depth = left.pop()
        number += 1
        if isinstance(each, str):
            if (fault := why_not_text(each)) is not None:
                return fault
        elif isinstance(each, int):
            if each.bit_length() > _MOST_BITS:
                return "has a whole number of more than 4,200 digits: write it as a text"
        elif isinstance(each, Mapping | list | tuple):
            if depth == DEEPEST or number + len(each) > _MOST_VALUES:
                few = f"at most {DEEPEST} levels" if depth == DEEPEST else "fewer values"
                return f"is nested too deeply, has too many values or contains itself: use {few}"
            if isinstance(each, Mapping):
                for name in each:
                    if not isinstance(name, str):
                        return f"has the name {brief(name)}: use names that are texts"
                    left.append((name, depth))
                each = each.values()
            left.extend((part, depth + 1) for part in each)
    return None


def why_not_text(text: str) -> str | None:
    """Returns why a text cannot be encoded, as a clause with the fix; `None` where it can."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return (
            f"has {text[error.start]!r} at character {error.start + 1} of a text, half of a "
            f"character that was cut in two: remove it"
        )
    return None


def field(
    fields: Mapping[str, Any],
    name: str,
    kind: type[T],
    called: str,
    default: T | EllipsisType = ...,
) -> T:
    """Returns a field of a file; raises `FileError` where it is missing or of another type.

    **Arguments:** the fields; the name; the type, where `float` admits whole numbers; what to call
    the file in messages; what to return where the field is missing or null, if it may be.
    """
    value: Any = fields.get(name)
    if value is None and not isinstance(default, EllipsisType):
        return default
    if name not in fields:
        raise FileError(f"{called} has no {name}: write or copy it again.")
    if not is_a(value, kind):
        raise FileError(f"{called}: {name} is {brief(value)}: expected {_WORDS[kind]}.")
    return value if kind is not float else float(value)  # type: ignore[return-value]


def is_a(value: Any, kind: type) -> bool:
    """Returns whether a value of a file is of a type: true and false are no numbers."""
    if kind is float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and (isinstance(value, float) or abs(value) <= sys.float_info.max)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def are_all(values: Any, kind: type) -> bool:
    """Returns whether a value of a file is a list of one type."""
    return isinstance(values, Sequence) and all(is_a(each, kind) for each in values)
