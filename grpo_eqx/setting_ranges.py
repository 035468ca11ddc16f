"""Ranges of settings, stated in their types and checked by `check_ranges`."""

import dataclasses
import functools
import math
import re
from collections.abc import Callable
from numbers import Integral
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from grpo_eqx.errors import UserError


@dataclasses.dataclass(frozen=True)
class Range:
    """The values that a number may have, and how a message says so."""

    admits: Callable[[float], bool]
    words: str


PositiveInt = Annotated[int, Range(lambda x: x >= 1, "at least 1")]
NonNegativeInt = Annotated[int, Range(lambda x: x >= 0, "at least 0")]
PositiveFloat = Annotated[float, Range(lambda x: 0 < x < math.inf, "above 0 and finite")]
NonNegativeFloat = Annotated[float, Range(lambda x: 0 <= x < math.inf, "finite and not negative")]
Share = Annotated[float, Range(lambda x: 0 <= x <= 1, "at least 0 and at most 1")]
PositiveShare = Annotated[float, Range(lambda x: 0 < x <= 1, "above 0 and at most 1")]
ShareBelowOne = Annotated[float, Range(lambda x: 0 <= x < 1, "at least 0 and below 1")]


_DURATION = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")


def parse_duration(name: str, text: str) -> float:
    """Returns the seconds of a duration such as `11h50m`. **Arguments:** its name in messages."""
    match = _DURATION.fullmatch(text)
    parts = [int(part or 0) for part in match.groups()] if match else []
    seconds = float(sum(part * size for part, size in zip(parts, (3600, 60, 1), strict=False)))
    if not seconds:
        raise UserError(
            f"{name} is {text!r}: give hours, minutes and seconds, as in 11h50m, more than 0."
        )
    return seconds


def check_ranges(settings: Any) -> None:
    """Raises `UserError` for the first field of a dataclass whose value its type does not allow.

    Checks the ranges above and the values of a `Literal`, each also as a part of a union.
    """
    kind: type = type(settings)
    for name, parts in _union_parts(kind).items():
        value = getattr(settings, name)
        ranges = [part for part in parts if get_origin(part) is Annotated]
        listed = [part for part in parts if get_origin(part) is Literal or part is NoneType]
        choices = [value for part in listed for value in (get_args(part) or (None,))]
        if value in choices:
            continue
        if ranges:
            _check_number(name, value, *get_args(ranges[0]))
        elif len(listed) == len(parts):
            raise UserError(f"{name} is {value!r}: use {', '.join(map(str, choices))}.")


@functools.cache
def _union_parts(kind: type) -> dict[str, tuple[Any, ...]]:
    """Returns the types that the type of each field is a union of."""
    hints = get_type_hints(kind, include_extras=True)
    return {
        name: get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        for name, hint in hints.items()
    }


def _check_number(name: str, value: Any, kind: type, allowed: Range) -> None:
    if kind is int and (not isinstance(value, Integral) or isinstance(value, bool)):
        raise UserError(f"{name} is {value!r}: use a whole number.")
    if not allowed.admits(value):
        raise UserError(f"{name} is {value}: it must be {allowed.words}.")
