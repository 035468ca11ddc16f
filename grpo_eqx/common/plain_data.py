"""Plain data, which JSON can hold, and typed fields of files."""

import sys
from collections.abc import Mapping, Sequence
from types import EllipsisType
from typing import Any, TypeVar

from grpo_eqx.common.errors import FileError

T = TypeVar("T")
DEEPEST = 100
"""Most levels of nested lists and objects: more would reach Python's limit on recursion."""
_MOST_VALUES = 2_000_000
_MOST_BITS = 14_000
"""Most bits of an integer that Python writes, in at most 4,300 digits."""
_QUOTED = 60
"""Most characters of a value that a message quotes."""
_WORDS: Mapping[type, str] = {
    bool: "true or false", int: "a whole number", float: "a number", str: "a text",
    list: "a list", dict: "an object with names",
}  # fmt: skip


def brief(value: Any, most: int = _QUOTED) -> str:
    """Returns the `repr` of a value, cut for messages.

    Never fails: a value without a `repr` is named by its type.
    """
    try:
        text = repr(value)
    except Exception:  # from a user's object, too deep a value, or too long a number
        return f"of the type {type(value).__name__}"
    return text if len(text) <= most else f"{text[:most]}..."


def why_not_plain(value: Any) -> str | None:
    """Returns why a value is not plain data, as a clause with the fix; `None` if it is.

    Looks into lists, tuples and mappings, and ignores objects of other types. Rejects names that
    are not texts, halves of characters, whole numbers that are too long for Python to write, and
    values that are nested too deeply, contain themselves, or are too many.
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
    """Returns why a text cannot be encoded, as a clause with the fix; `None` if it can."""
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
    """Returns a field of a file; raises `FileError` if it is missing or has another type.

    **Arguments:**

    - `fields`, `name`: all fields, and the name of this one.
    - `kind`: its type; `float` also allows whole numbers.
    - `called`: what to call the file in messages.
    - `default`: the result for a missing field or null; by default, both are errors.
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
    """Returns whether a value of a file has a type; true and false do not count as numbers."""
    if kind is float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and (isinstance(value, float) or abs(value) <= sys.float_info.max)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def are_all(values: Any, kind: type) -> bool:
    """Returns whether a value of a file is a list of one type."""
    return isinstance(values, Sequence) and all(is_a(each, kind) for each in values)
