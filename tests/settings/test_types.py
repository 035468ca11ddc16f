"""What types of settings admit, and what they convert."""

import dataclasses
import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import numpy as np
import pytest

from grpo_eqx.common.errors import UserError
from grpo_eqx.settings.config import GRPOConfig
from grpo_eqx.settings.types import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    Share,
    ShareBelowOne,
    convert_settings,
    union_parts,
)
from grpo_eqx.settings.types import converted as of_type
from grpo_eqx.training.optimizer import learning_rate


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
    weights: tuple[float, ...] | None = None
    flag: bool = False


def with_value(name: str, value: Any) -> Settings:
    """Sets a field whatever its type: tests check types of arguments."""
    settings = Settings()
    setattr(settings, name, value)
    return settings


def converted(name: str, value: Any) -> Any:
    settings = with_value(name, value)
    convert_settings(settings)
    return getattr(settings, name)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("count", (1, 7, "auto", None)),
        ("wait", (0, 1)),
        ("rate", (1e-30, 2.0)),
        ("weight", (0.0, 3.5)),
        ("kept", (1e-9, 1.0)),
        ("some", (0.0, 1.0)),
        ("decay", (0.0, 1 - 1e-9)),
        ("kind", ("a", "b", None)),
        ("text", ("anything", None)),
        ("names", (("x",), ())),
        ("flag", (True, False)),
    ],
)
def test_what_a_type_admits_stays_as_it_is(name: str, values: tuple[Any]) -> None:
    for value in values:
        kept = converted(name, value)
        assert kept == value
        assert type(kept) is type(value)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("rate", "1e-6", 1e-6),  # as YAML reads it, for lack of a dot
        ("rate", 2, 2.0),
        ("rate", np.float32(0.5), 0.5),
        ("count", 8.0, 8),
        ("count", "8", 8),
        ("count", np.int64(8), 8),
        ("flag", "true", True),
        ("flag", np.True_, True),
        ("names", ["x", "y"], ("x", "y")),
        ("names", "x", ("x",)),
        ("weights", [1, "0.5"], (1.0, 0.5)),
        ("text", Path("folder/file"), "folder/file"),
    ],
)
def test_what_can_mean_one_thing_is_converted(name: str, value: Any, expected: Any) -> None:
    result = converted(name, value)
    assert result == expected
    assert type(result) is type(expected)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("count", 0, "count is 0: it must be at least 1, or None."),
        ("count", 8.5, "count is 8.5: use a whole number (at least 1), auto or None."),
        ("count", True, "count is True: use a whole number (at least 1), auto or None."),
        ("count", "atuo", "count is 'atuo': use a whole number (at least 1), auto or None (did you "
         "mean auto?)."),
        ("wait", -1, "wait is -1: it must be at least 0."),
        ("wait", None, "wait is None: use a whole number (at least 0)."),
        ("wait", math.inf, "wait is inf: use a whole number (at least 0)."),
        ("rate", 0.0, "rate is 0.0: it must be above 0 and finite."),
        ("rate", math.nan, "rate is nan: it must be above 0 and finite."),
        ("rate", "fast", "rate is 'fast': use a number (above 0 and finite)."),
        ("weight", math.inf, "weight is inf: it must be finite and not negative."),
        ("kept", 0.0, "kept is 0.0: it must be above 0 and at most 1."),
        ("some", 1.1, "some is 1.1: it must be at least 0 and at most 1."),
        ("decay", 1.0, "decay is 1.0: it must be at least 0 and below 1."),
        ("kind", "c", "kind is 'c': use a, b or None."),
        ("text", 5, "text is 5: use a string or None."),
        ("names", [1], "names is [1]: use a list, each a string."),
        ("weights", ["x"], "weights is ['x']: use a list, each a number, or None."),
        ("flag", "yes", "flag is 'yes': use True or False."),
        ("flag", 1, "flag is 1: use True or False."),
    ],
)  # fmt: skip
def test_the_rest_is_refused_by_name(name: str, value: Any, message: str) -> None:
    with pytest.raises(UserError) as refused:
        convert_settings(with_value(name, value))
    assert str(refused.value) == message


def test_a_hint_is_added_where_the_type_is_wrong() -> None:
    hints = {"wait": "for a share set wait_ratio"}
    with pytest.raises(
        UserError, match=r"wait is 0.1: .* \(at least 0\); for a share set wait_rat"
    ):
        convert_settings(with_value("wait", 0.1), hints)
    with pytest.raises(UserError, match=r"wait is -1: it must be at least 0\.$"):
        convert_settings(with_value("wait", -1), hints)


def test_names_and_paths_have_no_null_character() -> None:
    for name in ("data", "output_dir", "model", "eval_data"):
        with pytest.raises(UserError, match=f"{name} has a null character: remove it"):
            GRPOConfig(**{name: "a\0b"})


def _numbers() -> list[str]:
    """Names of all settings of a run that are numbers, or lists of them."""
    found = []
    for name, parts in union_parts(GRPOConfig).items():
        kinds = [get_args(part)[0] if get_origin(part) is Annotated else part for part in parts]
        if not {int, float, tuple[float, ...]}.isdisjoint(kinds):
            found.append(name)
    return found


EXTREMES = [
    10**9 + 1, 2**31, 2**63, 10**30, 10**400, "9" * 5000, "1e400", 1e-320, 1e308, -1e308,
    math.nan, math.inf, -math.inf, -0.0, "1e-320", "-0.0",
]  # fmt: skip


@pytest.mark.parametrize("value", EXTREMES, ids=lambda value: str(value)[:8])
def test_numbers_that_nothing_computes_with_are_refused(value: Any) -> None:
    """Counts are at most 10^9; other numbers are those that float32 has."""
    for name in _numbers():
        try:
            kept = of_type(GRPOConfig, name, value)
        except UserError:
            continue
        for number in kept if isinstance(kept, tuple) else (kept,):
            if name == "seed":
                assert 0 <= number < 2**32
            elif math.isfinite(number):  # others are for the checks of the config
                assert number == 0 or 1e-30 <= abs(number) <= 1e30
                assert isinstance(number, float) or number <= 10**9


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"steps": 10**18}, "steps is 1000000000000000000: it must be at most 1,000,000,000."),
        (
            {"num_generations": 2**31},
            "num_generations is 2147483648: it must be at most 1,000,000,000.",
        ),
        (
            {"hang_timeout": 1e12},
            "hang_timeout is 1000000000000.0: it must be at most 1,000,000,000",
        ),
        ({"temperature": 1e-320}, "it must be at least 1e-30."),
        ({"reward_weights": (1e300,)}, "reward_weights is 1e+300: it must be at most 1e+30"),
        ({"reward_weights": (1e20,)}, "reward_weights are "),
        ({"beta": 1e31}, "beta is 1e+31: it must be at most 1e+30."),
        ({"num_train_epochs": 1e20}, "steps is "),
        ({"stop_after": "9" * 5000 + "h"}, "give hours, minutes and seconds"),
        ({"stop_after": "9" * 400 + "h"}, "give hours, minutes and seconds"),
        ({"profile_steps": "1:" + "9" * 5000}, "give one step, or the first and the last"),
    ],
)
def test_extremes_are_said(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        GRPOConfig(**settings).for_problems(1000)


def test_the_largest_counts_are_settings_like_others() -> None:
    cfg = GRPOConfig(steps=10**9, seed=2**32 - 1, max_grad_norm=1e9).resolved()
    assert learning_rate(cfg, 0) == pytest.approx(cfg.learning_rate)
    assert learning_rate(cfg, 10**9 - 1) == pytest.approx(0, abs=1e-12)
