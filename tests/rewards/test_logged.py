"""What reward functions log: metrics, and columns of the completions table."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from grpo_eqx.common.errors import RewardError
from grpo_eqx.data.acted import Acted, ToolCounts
from grpo_eqx.data.prompts import Prompt
from grpo_eqx.rewards import RewardLimits, RewardRunner, Rewards
from grpo_eqx.rewards.logged import Logged, TrainerState

PROMPTS = [Prompt("1+1?", {}), Prompt("2+2?", {})]
TEXTS = [["a", "bb"], ["ccc", "d"]]
IDS = [[[1], [2]], [[3], [4]]]


def rewarded(*funcs: Callable[..., Any], acted: Acted | None = None, **limits: Any) -> Rewards:
    named = {func.__name__: func for func in funcs}
    with RewardRunner(named, limits=RewardLimits(**limits), max_steps=9) as runner:
        return runner(PROMPTS, TEXTS, IDS, acted=acted, step=4)


def logged(*funcs: Callable[..., Any], **arguments: Any) -> Logged:
    found = rewarded(*funcs, **arguments).logged
    assert found is not None
    return found


def words(completions: list[str], log_extra: Any, log_metric: Any, **columns: Any) -> list[float]:
    """Fails on "bb", after it has logged."""
    assert not {"log_extra", "log_metric", "trainer_state"} & columns.keys()
    log_extra("text", completions)
    for text in completions:
        log_metric("length", len(text))
    if "bb" in completions:
        raise OSError("no answer")
    return [0.0] * len(completions)


async def awaited(completions: list[str], log_extra: Any, **columns: Any) -> list[float]:
    await asyncio.sleep(0)
    log_extra("size", np.array([len(text) for text in completions]))
    return [0.0] * len(completions)


def test_only_functions_that_name_them_get_what_they_log_with() -> None:
    def unaware(completions: list[str], **columns: Any) -> list[float]:
        assert columns.keys() == {"prompts", "completion_ids"}
        return [0.0] * len(completions)

    def plain(
        prompts: Any, completions: list[str], completion_ids: Any, log_extra: Any
    ) -> list[float]:
        log_extra("mixed", [True, None, 2.5, "x"])
        return [0.0] * len(completions)

    assert logged(plain, awaited, unaware).table() == {
        "mixed": ["True", None, "2.5", "x"],
        "size": [1, 2, 3, 1],
    }
    assert rewarded(unaware).logged is None


def test_metrics_are_means_of_all_that_is_logged_under_a_name() -> None:
    def first(completions: list[str], trainer_state: Any, log_metric: Any, **_: Any) -> list[float]:
        assert trainer_state == TrainerState(global_step=4, max_steps=9)
        log_metric("both", np.float32(1.0))
        return [0.0] * len(completions)

    def second(completions: list[str], log_metric: Any, **_: Any) -> list[float]:
        log_metric("both", 2)
        log_metric("both", 6.0)
        log_metric("also", True)
        return [0.0] * len(completions)

    assert logged(first, second).means() == {"also": 1.0, "both": 3.0}


@pytest.mark.parametrize("timeout", [None, 30.0])
def test_what_a_failed_call_logged_does_not_count(timeout: float | None) -> None:
    async def async_words(
        completions: list[str], log_extra: Any, log_metric: Any, **columns: Any
    ) -> list[float]:
        return words(completions, log_extra, log_metric, **columns)

    func = words if timeout is None else async_words
    found = logged(func, failures="drop", timeout=timeout, max_failed=0.5)
    assert found.table() == {"text": ["a", None, "ccc", "d"]}
    assert sorted(found.metrics["length"]) == [1.0, 1.0, 3.0]


def test_a_call_that_is_late_logs_nothing() -> None:
    async def slow(completions: list[str], log_metric: Any, **columns: Any) -> list[float]:
        log_metric("begun", 1.0)
        await asyncio.sleep(60.0)
        return [0.0] * len(completions)

    assert logged(slow, failures="drop", max_failed=1.0, batch_timeout=0.1).means() == {}


def test_lost_completions_have_no_values() -> None:
    messages = [[{"role": "assistant", "content": text}] for row in TEXTS for text in row]
    acted = Acted(["?"] * 4, messages, [None] * 4, [ToolCounts(lost=n in (0, 3)) for n in range(4)])

    def turns(completions: list[Any], log_extra: Any, **columns: Any) -> list[float]:
        log_extra("turns", [len(each) for each in completions])
        return [0.0] * len(completions)

    assert logged(turns, acted=acted).table() == {"turns": [None, 1, 1, None]}


def call(name: str, *arguments: Any) -> Callable[..., list[float]]:
    """A reward function that logs, and goes on whatever comes of that."""

    def judge(completions: list[str], log_extra: Any, log_metric: Any, **_: Any) -> list[float]:
        with contextlib.suppress(ValueError):
            {"extra": log_extra, "metric": log_metric}[name](*arguments)
        return [0.0] * len(completions)

    return judge


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("metric", "score", float("nan")), "judge logs 'score' as nan: log finite numbers"),
        (("metric", "score", "high"), "judge logs 'score' as 'high': metrics are numbers"),
        (("metric", " ", 1.0), "judge logs a metric with the name ' ': give it a name"),
        (
            ("extra", "note", ["x"]),
            "judge logs the column 'note' with a list of 1 for 4 completions",
        ),
        (("extra", "note", "abcd"), "judge logs the column 'note' with 'abcd' for 4 completions"),
        (("extra", "reward", [1.0] * 4), "judge logs the column 'reward': give it a name"),
        (("extra", "rewards/judge", [1.0] * 4), "judge logs the column 'rewards/judge': give it"),
        (("extra", 3, [1.0] * 4), "judge logs the column 3: give it a name that is a text"),
    ],
)
@pytest.mark.parametrize("failures", ["stop", "drop"])
def test_what_cannot_be_logged_is_an_error(
    arguments: Sequence[Any], message: str, failures: str
) -> None:
    with pytest.raises(RewardError, match=message):
        rewarded(call(*arguments), failures=failures)


def test_a_column_is_of_one_function() -> None:
    def other(completions: list[str], log_extra: Any, **columns: Any) -> list[float]:
        log_extra("size", [0] * len(completions))
        return [0.0] * len(completions)

    with pytest.raises(RewardError, match="awaited and other both log the column 'size'"):
        rewarded(awaited, other)


def test_values_are_kept_as_what_tables_can_hold() -> None:
    def of(*values: Any) -> Any:
        found = logged(lambda log_extra, completions, **_: log_extra("x", values) or [0.0] * 4)
        return found.table()["x"]

    assert of(True, None, np.bool_(False), True) == [True, None, False, True]
    assert of(1, np.int64(2), 0.5, None) == [1.0, 2.0, 0.5, None]
    assert of("\ud800", "b", "c", None) == ["?", "b", "c", None]
    assert of(2**70, [1], {"a": 1}, "c") == [str(2**70), "[1]", "{'a': 1}", "c"]
    assert of(None, None, None, None) == [None] * 4


def test_a_trial_checks_and_logs_nothing() -> None:
    runner = RewardRunner({"words": words}, max_steps=9)
    runner.try_out(PROMPTS[0], "a", [1])
    assert runner(PROMPTS, [["a"], ["d"]], [[[1]], [[2]]]).logged == Logged(
        2, {"length": [1.0, 1.0]}, {"text": ["a", "d"]}
    )
    broken = RewardRunner({"judge": call("metric", "", 1.0)}, max_steps=9)
    with pytest.raises(RewardError, match=r"judge logs a metric .* This was a trial call"):
        broken.try_out(PROMPTS[0], "a", [1])


def test_functions_outside_of_training_do_not_log() -> None:
    def may_log(completions: list[str], log_metric: Any = None, **columns: Any) -> list[float]:
        assert log_metric is None
        return [0.0] * len(completions)

    assert RewardRunner({"may_log": may_log})(PROMPTS, TEXTS, IDS).logged is None


def test_columns_follow_their_prompts_and_metrics_add_up() -> None:
    def once(completions: list[str], log_extra: Any, log_metric: Any, **_: Any) -> list[float]:
        log_metric("count", 1.0)
        log_extra("once", completions)
        return [0.0] * len(completions)

    def may_log(completions: list[str], log_metric: Any, **columns: Any) -> list[float]:
        log_metric("count", 4.0)
        return [0.0] * len(completions)

    made = rewarded(once).joined(rewarded(may_log))
    assert made.logged is not None
    assert made.logged.means() == {"count": 2.5}
    kept = made.of_prompts(np.array([2, 1])).logged
    assert kept is not None
    assert kept.table() == {"once": [None, None, "ccc", "d"]}
