"""Reward functions and the names that they are logged under."""

import functools
from typing import Any

import pytest

from grpo_eqx import GRPOConfig
from grpo_eqx.common.errors import UserError
from grpo_eqx.rewards.make_rewards import make_rewards, named_funcs


def score(*, completions: list[str], scale: float = 1.0, **columns: Any) -> list[float]:
    return [scale] * len(completions)


class Judge:
    def __init__(self, model: str):
        self.model = model

    def verdict(self, *, completions: list[str], **columns: Any) -> list[float]:
        return [0.0] * len(completions)

    def __call__(self, *, completions: list[str], **columns: Any) -> list[float]:
        return [0.0] * len(completions)


def lambdas() -> list[Any]:
    return [lambda **_: [0.0], lambda **_: [1.0]]


PAIRS = {
    "functools.partial": [functools.partial(score, scale=x) for x in (1.0, 2.0)],
    "bound methods": [Judge("a").verdict, Judge("b").verdict],
    "objects of one class": [Judge("a"), Judge("b")],
    "lambdas": lambdas(),
    "the same function": [score, score],
    "a name of a built-in one": ["tags", "tags"],
}


@pytest.mark.parametrize("funcs", PAIRS.values(), ids=PAIRS)
def test_functions_of_one_name_are_refused_with_advice_that_works(funcs: list[Any]) -> None:
    cfg = GRPOConfig().resolved()
    advice = (
        r'same name, \S+: name each in a dict, as in \{"first": a_function, "second": another\}'
    )
    with pytest.raises(UserError, match=advice):
        make_rewards(cfg, funcs)
    named = make_rewards(cfg, dict(zip(("first", "second"), funcs, strict=True)))
    assert list(named.funcs) == ["first", "second"]


REFUSED = r"reward_funcs has a function with the name .* in a dict"


@pytest.mark.parametrize("name", ["", " ", "a\nb", "\x1b[2J", "\ud800", 1, None, ("a",)])
def test_names_that_nothing_can_be_logged_under_are_refused(name: Any) -> None:
    with pytest.raises(UserError, match=REFUSED):
        named_funcs({name: score}, "reward_funcs")
    if isinstance(name, str):
        renamed = Judge("a")
        renamed.__name__ = name  # type: ignore[attr-defined]
        with pytest.raises(UserError, match=REFUSED):
            named_funcs([score, renamed], "reward_funcs")


def test_the_name_of_the_penalty_is_taken_also_in_a_dict() -> None:
    cfg = GRPOConfig(overlong_buffer=0.5).resolved()
    with pytest.raises(
        UserError, match="soft_overlong, which is that of a penalty or an environment of"
    ):
        make_rewards(cfg, {"soft_overlong": score})
    assert list(make_rewards(cfg, {"mine": score}).funcs) == ["mine", "soft_overlong"]
