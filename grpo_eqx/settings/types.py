"""Types of settings: the values that each admits, and the obvious conversions to them."""

import contextlib
import dataclasses
import difflib
import enum
import functools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from grpo_eqx.common.errors import UserError, refuse_all
from grpo_eqx.common.plain_data import brief, why_not_text

_LARGEST_COUNT = 1e9
"""Count that 32 bits hold, also when it is doubled."""
_SMALLEST, _LARGEST = 1e-30, 1e30
"""Magnitudes of numbers that float32 computes with, 0 aside."""


@dataclasses.dataclass(frozen=True)
class Range:
    """The values that a number may have, and how a message says so."""

    admits: Callable[[float], bool]
    words: str
    most: float = _LARGEST
    """Largest value, where `words` do not say it."""


def _count(least: int, words: str) -> Range:
    return Range(lambda x: x >= least, words, _LARGEST_COUNT)


PositiveInt = Annotated[int, _count(1, "at least 1")]
NonNegativeInt = Annotated[int, _count(0, "at least 0")]
Port = Annotated[int, Range(lambda x: 0 <= x < 2**16, "at least 0 and at most 65,535")]
GroupSize = Annotated[int, _count(2, "at least 2: advantages are relative to a group")]
Seed = Annotated[int, Range(lambda x: 0 <= x < 2**32, "at least 0 and below 2^32")]
PositiveFloat = Annotated[float, Range(lambda x: 0 < x < math.inf, "above 0 and finite")]
NonNegativeFloat = Annotated[float, Range(lambda x: 0 <= x < math.inf, "finite and not negative")]
Seconds = Annotated[
    float, Range(lambda x: 0 < x < math.inf, "above 0 and finite", _LARGEST_COUNT)
]  # Python's clocks wait for no longer than 292 years
Share = Annotated[float, Range(lambda x: 0 <= x <= 1, "at least 0 and at most 1")]
PositiveShare = Annotated[float, Range(lambda x: 0 < x <= 1, "above 0 and at most 1")]
ShareBelowOne = Annotated[float, Range(lambda x: 0 <= x < 1, "at least 0 and below 1")]
SamplingTemperature = Annotated[
    float, Range(lambda x: 0 < x < math.inf, "above 0 and finite: training samples completions")
]
InnerShare = Annotated[float, Range(lambda x: 0 < x < 1, "between 0 and 1")]


_LONGEST_VALUE = 80
"""Characters of a value that a message quotes."""
_DURATION = re.compile(r"(?:(\d{1,9})h)?(?:(\d{1,9})m)?(?:(\d{1,9})s)?")


def parse_duration(name: str, text: str) -> float:
    """Returns the seconds of a duration such as `11h50m`.

    **Arguments:**

    - `name`: name of the setting, for messages.
    - `text`: the text.
    """
    match = _DURATION.fullmatch(text)
    parts = [int(part or 0) for part in match.groups()] if match else []
    seconds = float(sum(part * size for part, size in zip(parts, (3600, 60, 1), strict=False)))
    if not seconds:
        raise UserError(
            f"{name} is {text!r}: give hours, minutes and seconds, as in 11h50m, more than 0."
        )
    return seconds


def parse_steps(name: str, text: str) -> range:
    """Returns the steps of a range such as `5:7`, which has the last too, or of one as in `5`.

    **Arguments:**

    - `name`: name of the setting, for messages.
    - `text`: the text.
    """
    match = re.fullmatch(r"(\d{1,9})(?::(\d{1,9}))?", text)
    first, last = (int(part or match[1]) for part in match.groups()) if match else (0, 0)
    if not 1 <= first <= last:
        raise UserError(
            f"{name} is {text!r}: give one step, or the first and the last, as in 5:7, counted "
            f"from 1."
        )
    return range(first, last + 1)


def refuse_address(name: str, path: str | Path) -> None:
    """Raises `UserError` for an address such as `gs://bucket`, where only folders can be used."""
    address = re.match(r"([A-Za-z][\w+.-]+:)/+(.*)", str(path))  # `Path` makes one slash of two
    if address is not None:
        raise UserError(
            f"{name} is '{address[1]}//{address[2]}', an address, and runs are read and written as "
            f"files: mount the bucket, for example with gcsfuse, and give the folder."
        )


def convert_settings(settings: Any, hints: Mapping[str, str] | None = None) -> None:
    """Gives the fields of a dataclass, frozen or not, the types of their annotations.

    **Arguments:**

    - `settings`: values by name.
    - `hints`: advice to add to messages, by field, or by field and value as in `top_k=0`.

    Raises the errors of `all_converted`.
    """
    kind: type = type(settings)
    values = {name: getattr(settings, name) for name in union_parts(kind)}
    for name, value in all_converted(kind, values, hints or {}).items():
        object.__setattr__(settings, name, value)


def all_converted(
    kind: type, values: Mapping[str, Any], hints: Mapping[str, str]
) -> dict[str, Any]:
    """Returns values, by the names of a dataclass' fields, as the types of these.

    Converts what can mean one thing only, as values from YAML and JSON files do: `"1e-6"` to a
    float, `8.0` to an integer, lists and single values to tuples, mappings to tuples of
    `NAME=VALUE` in JSON, paths to strings, `"None"` to `None`. Raises one `UserError` for all
    values that their types do not admit.
    """
    result = dict[str, Any]()

    def convert(name: str) -> None:
        result[name] = converted(kind, name, values[name], hints)

    refuse_all(*(functools.partial(convert, name) for name in values))
    return result


@functools.cache
def union_parts(kind: type) -> dict[str, tuple[Any, ...]]:
    """Returns the types that the type of each field is a union of."""
    hints = get_type_hints(kind, include_extras=True)
    return {
        field.name: get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        for field in dataclasses.fields(kind)
        for hint in [hints[field.name]]
    }


def converted(kind: type, name: str, value: Any, hints: Mapping[str, str] | None = None) -> Any:
    """Returns a value as the type of a dataclass' field, as `all_converted` does.

    Of the types in a union, it is the first that can be meant.
    """
    hints, parts = hints or {}, union_parts(kind)[name]
    try:
        result, part = as_one_of(parts, value)
    except ValueError:
        hint = hints.get(f"{name}={brief(value)}", hints.get(f"{name}={value}", hints.get(name)))
        raise UserError(
            f"{name} is {brief(value, _LONGEST_VALUE)}: {_wanted(parts, value, hint)}."
        ) from None
    for text in result if isinstance(result, tuple) else (result,):
        if not isinstance(text, str | Path):
            continue
        if "\0" in str(text):  # which no path may have
            raise UserError(f"{name} has a null character: remove it.")
        if (fault := why_not_text(str(text))) is not None:
            raise UserError(f"{name} {fault}.")
    allowed = _range(part)
    or_none = ", or None" if NoneType in parts else ""
    if allowed is not None and not allowed.admits(result):
        hint = hints.get(f"{name}={result:g}")
        more = f"; {hint}" if hint else or_none
        raise UserError(f"{name} is {value}: it must be {allowed.words}{more}.")
    fault = _extreme(result, _LARGEST if allowed is None else allowed.most)
    if fault is not None:
        raise UserError(f"{name} is {fault}{or_none}.")
    return result


def _extreme(value: Any, most: float) -> str | None:
    """Returns what is wrong with numbers that overflow, or vanish, where they are computed with."""
    for number in value if isinstance(value, tuple) else (value,):
        if not isinstance(number, int | float) or not math.isfinite(number):
            continue
        if abs(number) > most:
            largest = f"{most:,.0f}" if most == _LARGEST_COUNT else f"{most:g}"
            return f"{brief(number)}: it must be at most {largest}"
        if 0 < abs(number) < _SMALLEST:
            return f"{number}: it must be at least {_SMALLEST:g}"
    return None


def values_of(kind: type, name: str, hint: str | None = None) -> str:
    """Returns what to use for a dataclass' field, as a message says it."""
    return _wanted(union_parts(kind)[name], None, hint)


def _wanted(parts: Sequence[Any], value: Any, hint: str | None) -> str:
    """Returns what to use in place of a value that none of several types admits."""
    choices = [choice for part in parts for choice in _choices(part)]
    *others, last = [words for part in parts for words in _words(part)]
    comma = "," if any("," in words for words in others) else ""
    wanted = f"{', '.join(others)}{comma} or {last}" if others else last
    texts = [str(choice) for choice in choices if choice is not None]
    is_guess = isinstance(value, str) and (hint is None or value not in hint)
    near = closest(value, texts) if is_guess else None
    guess = f" (did you mean {near}?)" if near else ""
    more = "" if hint is None or near else f"; {hint}"
    return f"use {wanted}{guess}{more}"


def closest(value: str, texts: Sequence[str]) -> str | None:
    """Returns the text that a value is close to; `None` if no text is, or several are."""
    near = difflib.get_close_matches(value, texts, n=2)
    ratios = {difflib.SequenceMatcher(None, text, value).ratio() for text in near}
    return near[0] if near and len(ratios) == len(near) else None


def as_one_of(parts: Sequence[Any], value: Any) -> tuple[Any, Any]:
    """Returns a value as the first of several types that can be meant, and that type.

    Raises `ValueError` if it is none.
    """
    if isinstance(value, enum.Enum):  # as transformers has them
        value = value.value
    if value == "None" and NoneType in parts:
        return None, NoneType
    for part in parts:
        if any(type(value) is type(choice) and value == choice for choice in _choices(part)):
            return value, part
    for part in parts:
        with contextlib.suppress(KeyError, OverflowError, TypeError, ValueError):
            return _convert(value, part), part
    raise ValueError(value)


def _choices(part: Any) -> tuple[Any, ...]:
    """Returns the values that a type lists."""
    if part is NoneType:
        return (None,)
    return get_args(part) if get_origin(part) is Literal else ()


def _range(part: Any) -> Range | None:
    return get_args(part)[1] if get_origin(part) is Annotated else None


def _words(part: Any) -> list[str]:
    """Returns phrases for the values that a type admits."""
    if choices := _choices(part):
        return [str(choice) for choice in choices]
    if (allowed := _range(part)) is not None:
        return [f"{_NOUNS[get_args(part)[0]]} ({allowed.words})"]
    if get_origin(part) is tuple:
        return [f"a list, each {_words(get_args(part)[0])[0]}"]
    if part is bool:
        return ["True", "False"]
    return [_NOUNS[part]] if part in _NOUNS else []


_NOUNS: dict[type, str] = {
    int: "a whole number", float: "a number", str: "a string", Path: "a path"
}  # fmt: skip


def _convert(value: Any, kind: Any) -> Any:
    """Converts a value to a type; raises an error if it cannot mean a value of the type."""
    if hasattr(value, "item"):  # a scalar of NumPy or JAX
        value = value.item()
    if get_origin(kind) is Annotated:
        return _convert(value, get_args(kind)[0])
    if get_origin(kind) is tuple:
        if isinstance(value, Mapping):
            value = [f"{name}={json.dumps(each)}" for name, each in value.items()]
        values = value if isinstance(value, list | tuple) else [value]
        return tuple(_convert(each, get_args(kind)[0]) for each in values)
    if kind not in _CONVERSIONS and kind is not NoneType and get_origin(kind) is not Literal:
        return value  # a field of a subclass, which knows its type better
    return _CONVERSIONS[kind](value)


def _to_bool(value: Any) -> bool:
    if isinstance(value, str):
        return {"true": True, "false": False}[value.lower()]
    if not isinstance(value, bool):
        raise TypeError
    return value


def _to_int(value: Any) -> int:
    if isinstance(value, Integral) and not isinstance(value, bool):
        float(value)  # raises an error for one that is too large to compute with
        return int(value)
    number = _to_float(value)
    if not number.is_integer():
        raise ValueError
    return int(number)


def _to_float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, str | Real):
        raise TypeError
    return float(value)


def _to_str(value: Any) -> str:
    if not isinstance(value, str | Path):
        raise TypeError
    return str(value)


_CONVERSIONS: dict[type, Callable[[Any], Any]] = {
    bool: _to_bool, int: _to_int, float: _to_float, str: _to_str, Path: Path
}  # fmt: skip


def choices_of(kind: type, name: str) -> tuple[Any, ...]:
    """Returns the values that a field's type lists, `None` aside; none if it admits others too."""
    parts = [part for part in union_parts(kind)[name] if part is not NoneType]
    if any(get_origin(part) is not Literal for part in parts):
        return ()
    return tuple(choice for part in parts for choice in get_args(part))


def noun_of(kind: type, name: str) -> str:
    """Returns what stands for a field's value in a command's help; empty for a switch."""
    parts = union_parts(kind)[name]
    part = next(part for part in parts if get_origin(part) is not Literal)
    if part is bool and len(parts) > 1:  # no switch, as it has a third state
        return "BOOL"
    if get_origin(part) is tuple:
        return f"{_PLACEHOLDERS[get_args(part)[0]]} ..."
    return _PLACEHOLDERS[get_args(part)[0] if get_origin(part) is Annotated else part]


_PLACEHOLDERS = {bool: "", int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH"}
