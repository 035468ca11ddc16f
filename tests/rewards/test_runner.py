"""The contract between the trainer and reward functions."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from grpo_eqx.data.prompts import Prompt
from grpo_eqx.errors import RewardError, UserError
from grpo_eqx.rewards import RewardRunner, reward_func

PROMPTS = [Prompt("1+1?", {"answer": 2, "level": "a"}), Prompt("2+2?", {"answer": 4, "level": "b"})]
COMPLETIONS = [["2", "3"], ["5", "4"]]
IDS = [[[12], [13, 1]], [[15], [14]]]


def test_functions_receive_parallel_lists_with_every_column() -> None:
    seen: dict[str, Any] = {}

    def spy(prompts: list[str], completions: list[str], **columns: list[Any]) -> list[float]:
        seen.update(prompts=prompts, completions=completions, **columns)
        return [0.0] * len(completions)

    RewardRunner({"spy": spy})(PROMPTS, COMPLETIONS, IDS)
    assert seen == {
        "prompts": ["1+1?", "1+1?", "2+2?", "2+2?"],
        "completions": ["2", "3", "5", "4"],
        "completion_ids": [[12], [13, 1], [15], [14]],
        "answer": [2, 2, 4, 4],
        "level": ["a", "a", "b", "b"],
    }


def test_rewards_are_weighted_and_none_means_not_applicable() -> None:
    funcs = {
        "first": lambda completions, **_: [1.0, 0.0, None, None],
        "second": lambda completions, **_: [1.0, 2.0, 3.0, None],
    }
    rewards = RewardRunner(funcs, weights=[1.0, 0.5])(PROMPTS, COMPLETIONS, IDS)
    np.testing.assert_array_equal(rewards.total, [[1.5, 1.0], [1.5, np.nan]])
    np.testing.assert_array_equal(rewards.each[0], [[1.0, 0.0], [np.nan, np.nan]])
    assert rewards.names == ("first", "second")
    assert rewards.weights == (1.0, 0.5)


def test_functions_weigh_one_each_by_default() -> None:
    funcs = {"a": reward_func("format"), "b": reward_func("tags")}
    assert RewardRunner(funcs)(PROMPTS, COMPLETIONS, IDS).weights == (1.0, 1.0)


def test_a_penalty_applies_only_where_a_reward_does() -> None:
    funcs = {
        "first": lambda completions, **_: [None, 1.0, 1.0, None],
        "second": lambda completions, **_: [None, 1.0, None, None],
    }
    runner = RewardRunner(funcs, [1.0, 2.0])
    rewards = runner.with_penalty("length", lambda completions, **_: [-1.0, -0.5, 0.0, 0.0])(
        PROMPTS, COMPLETIONS, IDS
    )
    nan = np.nan
    np.testing.assert_array_equal(rewards.total, [[nan, 2.5], [1.0, nan]])
    np.testing.assert_array_equal(rewards.each[2], [[nan, -0.5], [0.0, nan]])
    assert rewards.weights == (1.0, 2.0, 1.0)
    assert np.nanmean(rewards.each[2]) == -0.25


def test_rewards_are_joined_and_picked_by_prompt() -> None:
    funcs = {
        "first": lambda completions, **_: [1.0, 2.0, None, None],
        "second": lambda completions, **_: [5.0, 6.0, 7.0, None],
    }
    rewards = RewardRunner(funcs, weights=[1.0, 0.5])(PROMPTS, COMPLETIONS, IDS)
    doubled = dataclasses.replace(rewards, each=2 * rewards.each, total=2 * rewards.total)
    picked = rewards.joined(doubled).of_prompts(np.array([3, 0, 0]))
    nan = np.nan
    np.testing.assert_array_equal(
        picked.each,
        [[[nan, nan], [1.0, 2.0], [1.0, 2.0]], [[14.0, nan], [5.0, 6.0], [5.0, 6.0]]],
    )
    np.testing.assert_array_equal(picked.total, [[7.0, nan], [3.5, 5.0], [3.5, 5.0]])
    assert (picked.names, picked.weights) == (rewards.names, rewards.weights)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1.0], r"bad returned 1 values for 4 completions"),
        (3.0, r"bad returned 3\.0 for 4 completions"),
        ([1.0, float("nan"), 0.0, 0.0], r"bad returned nan for completion 1"),
        ([1.0, 0.0, float("inf"), 0.0], r"bad returned inf for completion 2"),
        ([1.0, 0.0, 0.0, "yes"], r"bad returned 'yes' for completion 3"),
    ],
)
def test_a_broken_contract_names_function_and_row(returned: Any, message: str) -> None:
    bad: Callable[..., Any] = lambda completions, **_: returned  # noqa: E731
    with pytest.raises(RewardError, match=message):
        RewardRunner({"bad": bad})(PROMPTS, COMPLETIONS, IDS)


def test_weights_must_match_and_names_must_exist() -> None:
    with pytest.raises(UserError, match="2 reward functions and 1 reward_weights"):
        RewardRunner({"a": reward_func("format"), "b": reward_func("tags")}, weights=[1.0])
    with pytest.raises(UserError, match="no reward function named 'corect'; built-in: correct"):
        reward_func("corect")
