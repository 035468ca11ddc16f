"""Functions that cannot be called with the problems' columns are refused before a rollout."""

import functools
from collections.abc import Callable
from typing import Any

import pytest

from grpo_eqx.common.errors import UserError
from grpo_eqx.rewards.signatures import check_signatures, named_of_training


class Judge:
    def __call__(self, completions: list[str], *, answer: list[int], **columns: Any) -> list[float]:
        raise NotImplementedError


def score(completions: list[str], level: list[int], **columns: Any) -> list[float]:
    raise NotImplementedError


@functools.wraps(score)
def wrapped(completions: list[str], **columns: Any) -> list[float]:
    return score(completions, level=[1], **columns)


@pytest.mark.parametrize(
    "func",
    [
        Judge(),
        wrapped,
        functools.partial(score, level=[1]),
        lambda prompts, completions, completion_ids, answer: [],
        lambda completions, scale=2.0, **_: [],
        lambda **columns: [],
        max,  # its signature is not known
    ],
)
def test_functions_that_can_be_called_pass(func: Callable[..., Any]) -> None:
    check_signatures({"f": func}, ["answer"])


@pytest.mark.parametrize(
    ("func", "columns", "message"),
    [
        (score, ["answer"], "f asks for the column level, .* do not have: they have answer."),
        (score, [], "do not have: they have none."),
        (lambda answers, **_: [], ["answer"], r"they have answer \(did you mean answer\?\)."),
        (lambda answer_text, **_: [], ["answer"], r"they have answer\."),  # too far for a guess
        (lambda p, /, **_: [], [], "f takes p by position only"),
        (
            lambda completions: [],
            ["answer"],
            r"f does not take answer, completion_ids, prompts: add \*\*columns",
        ),
    ],
)
def test_others_are_refused(func: Callable[..., Any], columns: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_signatures({"f": func}, columns)


def test_functions_log_in_training_and_not_in_workers() -> None:
    def logs(completions: list[str], log_metric: Any, **columns: Any) -> list[float]:
        raise NotImplementedError

    async def awaited(log_extra: Any, trainer_state: Any, **columns: Any) -> list[float]:
        raise NotImplementedError

    def may_log(log_metric: Any = None, **columns: Any) -> list[float]:
        raise NotImplementedError

    funcs = {"f": logs, "g": awaited, "h": may_log, "i": score}
    check_signatures(funcs, ["level"], in_training=True)
    check_signatures({"g": awaited, "h": may_log}, [], in_training=True, workers=1)
    check_signatures({"h": may_log}, [])
    with pytest.raises(UserError, match=r"f asks for log_metric, .*: leave reward_workers at 0 or"):
        check_signatures(funcs, [], in_training=True, workers=1)
    with pytest.raises(
        UserError, match=r"f asks for log_metric, .* of evaluations cannot log; give"
    ):
        check_signatures(funcs, [])
    assert named_of_training(awaited) == {"log_extra", "trainer_state"}
    assert named_of_training(max) == frozenset()


def test_environments_are_not_in_workers() -> None:
    def in_a_game(environments: list[Any], **columns: Any) -> list[float]:
        raise NotImplementedError

    async def awaited(environments: list[Any], **columns: Any) -> list[float]:
        raise NotImplementedError

    funcs = {"f": in_a_game, "g": awaited}
    check_signatures(funcs, ["answer"], environments=True)
    check_signatures({"g": awaited}, ["answer"], environments=True, workers=1)
    with pytest.raises(UserError, match="leave reward_workers at 0 or write the function as async"):
        check_signatures(funcs, ["answer"], environments=True, workers=1)
    with pytest.raises(
        UserError, match=r"f asks for environments, which it does not get: pass env"
    ):
        check_signatures(funcs, ["answer"])
