"""Ranges that types of settings state."""

import dataclasses
import math
from typing import Any, Literal

import pytest

from grpo_eqx.errors import UserError
from grpo_eqx.setting_ranges import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    Share,
    ShareBelowOne,
    check_ranges,
)


@dataclasses.dataclass
class Settings:
    count: PositiveInt | Literal["auto"] | None = 1
    wait: NonNegativeInt = 0
    rate: PositiveFloat = 1.0
    weight: NonNegativeFloat = 0.0
    kept: PositiveShare = 1.0
    some: Share = 0.5
    decay: ShareBelowOne = 0.0
    kind: Literal["a", "b"] | None = "a"
    text: str | None = None
    names: tuple[str, ...] = ()


def with_value(name: str, value: Any) -> Settings:
    """Sets a field whatever its type: tests check types of arguments."""
    settings = Settings()
    setattr(settings, name, value)
    return settings


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("count", (1, 7, "auto", None)),
        ("wait", (0, 1)),
        ("rate", (1e-30, 2)),
        ("weight", (0, 3.5)),
        ("kept", (1e-9, 1)),
        ("some", (0, 1)),
        ("decay", (0, 1 - 1e-9)),
        ("kind", ("a", "b", None)),
        ("text", ("anything", None)),
        ("names", (("x",),)),
    ],
)
def test_the_ends_of_a_range_are_in_it_as_its_words_say(name: str, values: tuple[Any]) -> None:
    for value in values:
        check_ranges(with_value(name, value))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("count", 0, "count is 0: it must be at least 1."),
        ("count", 1.0, "count is 1.0: use a whole number."),
        ("count", True, "count is True: use a whole number."),
        ("count", "some", "count is 'some': use a whole number."),
        ("wait", -1, "wait is -1: it must be at least 0."),
        ("rate", 0.0, "rate is 0.0: it must be above 0 and finite."),
        ("rate", math.nan, "rate is nan: it must be above 0 and finite."),
        ("weight", math.inf, "weight is inf: it must be finite and not negative."),
        ("kept", 0.0, "kept is 0.0: it must be above 0 and at most 1."),
        ("some", 1.1, "some is 1.1: it must be at least 0 and at most 1."),
        ("decay", 1.0, "decay is 1.0: it must be at least 0 and below 1."),
        ("kind", "c", "kind is 'c': use a, b, None."),
    ],
)
def test_what_is_outside_is_refused_by_name(name: str, value: Any, message: str) -> None:
    with pytest.raises(UserError) as refused:
        check_ranges(with_value(name, value))
    assert str(refused.value) == message
