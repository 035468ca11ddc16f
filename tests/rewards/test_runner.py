"""The contract between the trainer and reward functions."""

import asyncio
import builtins
import dataclasses
import functools
import gc
import os
import subprocess
import threading
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from grpo_eqx.common.errors import RewardError, UserError
from grpo_eqx.data.prompts import Prompt
from grpo_eqx.rewards import RewardRunner, gsm8k, reward_func
from grpo_eqx.rewards.limits import RewardLimits

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


def test_conversations_are_answered_by_messages_as_in_trl() -> None:
    """Also for built-in functions, which read the last message."""
    seen: dict[str, Any] = {}

    def spy(prompts: list[Any], completions: list[Any], **columns: list[Any]) -> list[float]:
        seen.update(prompts=prompts, completions=completions)
        return gsm8k.correct(prompts, completions, **columns)

    chat = [{"role": "user", "content": "1+1?"}]
    rewards = RewardRunner({"spy": spy})([Prompt(chat, {"answer": 2})], [["2", "3"]], [[[1], [2]]])
    assert seen == {
        "prompts": [chat, chat],
        "completions": [[{"role": "assistant", "content": text}] for text in "23"],
    }
    assert rewards.total.tolist() == [[1.0, 0.0]]


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
        ([1.0], r"bad returned 1 value for 4 completions"),
        (3.0, r"bad returned 3\.0 for 4 completions"),
        ([1.0, float("nan"), 0.0, 0.0], r"bad returned nan for completion 1"),
        ([1.0, 0.0, float("inf"), 0.0], r"bad returned inf for completion 2"),
        ([1.0, 0.0, 0.0, "yes"], r"bad returned 'yes' for completion 3"),
        ([1.0, 0.0, "1.0", 0.0], r"bad returned '1\.0' for completion 2"),
        ("1010", r"bad returned '1010' for 4 completions"),
    ],
)
def test_a_broken_contract_names_function_and_row(returned: Any, message: str) -> None:
    bad: Callable[..., Any] = lambda completions, **_: returned  # noqa: E731
    with pytest.raises(RewardError, match=message):
        RewardRunner({"bad": bad})(PROMPTS, COMPLETIONS, IDS)


def test_a_trial_calls_every_function_once_with_one_completion() -> None:
    calls: list[tuple[Any, ...]] = []

    def length(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        calls.append((prompts, completions, columns))
        return [float(len(text)) for text in completions]

    prompt = Prompt("What is 1 + 1?", {"answer": 2})
    RewardRunner({"length": length}).try_out(prompt, "The answer is 42.", (4, 2))
    (call,) = calls
    columns = {"completion_ids": [[4, 2]], "answer": [2]}
    assert call == (["What is 1 + 1?"], ["The answer is 42."], columns)
    broken = RewardRunner({"broken": lambda **_: [1.0, 2.0]})
    with pytest.raises(RewardError, match=r"broken returned 2 values .* This was a trial call"):
        broken.try_out(prompt, "", ())


def test_weights_must_match_and_names_must_exist() -> None:
    with pytest.raises(UserError, match="2 reward functions and 1 reward_weights"):
        RewardRunner({"a": reward_func("format"), "b": reward_func("tags")}, weights=[1.0])
    with pytest.raises(UserError, match="no reward function named 'corect'; built-in: correct"):
        reward_func("corect")


def one_group(*texts: str) -> tuple[list[Prompt], list[list[str]], list[list[list[int]]]]:
    """Completions of one prompt, as a runner is given them."""
    return [Prompt("?", {"answer": 1})], [list(texts)], [[[1]] * len(texts)]


def dropping(**fields: Any) -> RewardLimits:
    return RewardLimits(failures="drop", **fields)


def test_async_functions_are_awaited_together_and_beside_plain_ones(
    reward_module: ModuleType,
) -> None:
    funcs = {"judge": reward_module.awaited, "plain": reward_module.length}
    funcs |= {f"judge{i}": functools.partial(reward_module.awaited) for i in range(8)}
    start = time.monotonic()
    with RewardRunner(funcs) as runner:
        rewards = runner(*one_group("wait", "abc"))
    assert time.monotonic() - start < 2  # not 9 times half a second
    np.testing.assert_array_equal(rewards.each, [[[4.0, 3.0]]] * 10)


def test_what_an_async_function_sets_for_a_while_is_not_laid_to_a_plain_one(
    capfd: pytest.CaptureFixture[str],
) -> None:
    popen, is_set, may_end, ended = subprocess.Popen, *(threading.Event() for _ in range(3))

    async def guards(completions: list[str], **columns: Any) -> list[float]:
        subprocess.Popen = None  # type: ignore[assignment,misc]
        gc.disable()
        is_set.set()
        await asyncio.to_thread(may_end.wait)
        subprocess.Popen = popen  # type: ignore[misc]
        gc.enable()
        ended.set()
        return [1.0] * len(completions)

    def waits(completions: list[str], **columns: Any) -> list[float]:
        is_set.wait()
        return [2.0] * len(completions)

    def scores(completions: list[str], **columns: Any) -> list[float]:
        may_end.set()
        ended.wait()
        return [3.0] * len(completions)

    def starts(completions: list[str], **columns: Any) -> list[float]:
        return [float(subprocess.Popen is popen and gc.isenabled())] * len(completions)

    funcs = {"guards": guards, "waits": waits, "scores": scores, "starts": starts}
    with RewardRunner(funcs) as runner:
        rewards = runner(*one_group("a"))
    np.testing.assert_array_equal(rewards.each.ravel(), [1.0, 2.0, 3.0, 1.0])
    assert capfd.readouterr().err == ""


def test_what_stays_changed_is_put_back_when_all_have_returned(
    capfd: pytest.CaptureFixture[str],
) -> None:
    async def judge(completions: list[str], **columns: Any) -> list[float]:
        return [1.0] * len(completions)

    def guards(completions: list[str], **columns: Any) -> list[float]:
        subprocess.Popen = os.getcwd = builtins.float = None  # type: ignore[assignment,misc]
        return [2.0] * len(completions)

    popen = subprocess.Popen
    with RewardRunner({"judge": judge, "tags": gsm8k.tags, "guards": guards}) as runner:
        rewards = runner(*one_group("a"))
    np.testing.assert_array_equal(rewards.each.ravel(), [1.0, 0.0, 2.0])
    assert subprocess.Popen is popen
    said = "reward function judge or guards changed names of Python's own: the run undid that"
    assert capfd.readouterr().err == f"warning: {said}\n"


def test_workers_start_while_an_async_function_guards_this_process(
    reward_module: ModuleType,
) -> None:
    is_set, popen = threading.Event(), subprocess.Popen

    async def guards(completions: list[str], **columns: Any) -> list[float]:
        subprocess.Popen = None  # type: ignore[assignment,misc]
        is_set.set()
        return [1.0] * len(completions)

    with RewardRunner(
        {"guards": guards, "length": reward_module.length}, limits=RewardLimits(workers=1)
    ) as runner:
        run = runner._workers.run

        def run_later(*args: Any, **kwargs: Any) -> Any:
            is_set.wait()
            return run(*args, **kwargs)

        runner._workers.run = run_later  # type: ignore[method-assign]
        rewards = runner(*one_group("abc"))
    np.testing.assert_array_equal(rewards.each.ravel(), [1.0, 3.0])
    assert subprocess.Popen is popen


def test_they_are_called_with_the_batch_or_with_a_timeout_once_per_completion() -> None:
    seen: list[list[str]] = []

    async def judge(completions: list[str], **columns: Any) -> list[float]:
        seen.append(completions)
        return [0.0] * len(completions)

    for limits in (RewardLimits(), RewardLimits(timeout=5.0)):
        with RewardRunner({"judge": judge}, limits=limits) as runner:
            runner(*one_group("a", "b"))
    assert seen == [["a", "b"], ["a"], ["b"]]


def test_they_keep_their_event_loop_between_batches() -> None:
    loops, before = set(), set(threading.enumerate())

    async def judge(completions: list[str], **columns: Any) -> list[float]:
        loops.add(asyncio.get_running_loop())
        return [0.0] * len(completions)

    with RewardRunner({"judge": judge}) as runner:
        runner(*one_group("a"))
        runner(*one_group("a"))
    assert len(loops) == 1
    assert set(threading.enumerate()) <= before


def test_they_work_where_a_loop_runs_as_in_a_notebook(reward_module: ModuleType) -> None:
    async def notebook() -> Any:
        with RewardRunner({"judge": reward_module.awaited}) as runner:
            return runner(*one_group("abc")).total

    assert asyncio.run(notebook()) == [[3.0]]


@pytest.mark.parametrize(
    ("func", "text"),
    [
        ("faulty", "raise"),
        ("faulty", "nan"),
        ("awaited", "raise"),
        ("awaited", "nan"),
        ("awaited", "hang"),
        ("awaited", "cancelled"),
        ("awaited", "system exit"),
        pytest.param("awaited", "refuse", marks=pytest.mark.slow),
    ],
)
def test_what_a_function_fails_on_is_dropped_for_all_functions(
    reward_module: ModuleType, text: str, func: str, capfd: pytest.CaptureFixture[str]
) -> None:
    limits = dropping(timeout=0.5) if func == "awaited" else dropping()
    funcs = {"judge": getattr(reward_module, func), "plain": gsm8k.tags}
    start = time.monotonic()
    with RewardRunner(funcs, limits=limits) as runner:
        rewards = runner(*one_group("a", text, "ccc"))
    assert time.monotonic() - start < 9
    np.testing.assert_array_equal(rewards.total, [[1.0, np.nan, 3.0]])
    np.testing.assert_array_equal(rewards.each[1], [[0.0, np.nan, 0.0]])
    np.testing.assert_array_equal(rewards.failed, [[[False, True, False]], [[False] * 3]])
    np.testing.assert_array_equal(rewards.dropped, [[False, True, False]])
    warning = capfd.readouterr().err
    assert warning.startswith("warning: reward function judge ")
    assert f"for completion 1 of 3 ({text!r}, to the prompt '?')" in warning


@pytest.mark.parametrize(
    ("func", "text", "reason"),
    [
        ("faulty", "raise", r"raised ValueError: no such unit \(reward_module\.py, line \d+\)"),
        ("faulty", "nan", "returned nan"),
        ("awaited", "raise", r"raised ValueError: no such unit \(reward_module\.py, line \d+\)"),
        ("awaited", "inf", "returned inf"),
        ("awaited", "hang", r"ran out of time \(reward_timeout is 0\.5 s\)"),
    ],
)
def test_by_default_a_failure_stops_and_names_the_sample(
    reward_module: ModuleType, func: str, text: str, reason: str
) -> None:
    limits = RewardLimits(timeout=0.5 if func == "awaited" else None)
    named = (
        rf"reward function judge {reason} for completion 2 of 3 \('{text}', to the prompt '\?'\)"
    )
    with (
        RewardRunner({"judge": getattr(reward_module, func)}, limits=limits) as runner,
        pytest.raises(RewardError, match=named) as raised,
    ):
        runner(*one_group("a", "bb", text))
    assert isinstance(raised.value.__cause__, ValueError) == (text == "raise")


@pytest.mark.parametrize("text", ["segfault", "sleep", "raise", "nan"])
def test_the_same_holds_of_functions_in_workers(reward_module: ModuleType, text: str) -> None:
    in_worker = reward_module.faulty
    funcs = {"judge": in_worker, "plain": gsm8k.tags}
    with RewardRunner(funcs, limits=dropping(timeout=1.0, workers=2)) as runner:
        np.testing.assert_array_equal(
            runner(*one_group("a", text, "ccc")).total[0, ::2], [1.0, 3.0]
        )
    limits = RewardLimits(timeout=1.0, workers=2)
    with (
        RewardRunner({"judge": in_worker}, limits=limits) as runner,
        pytest.raises(
            RewardError, match=r"reward function judge .* for completion 1 of 3"
        ) as error,
    ):
        runner(*one_group("a", text, "ccc"))
    assert ("in _obey" in str(error.value.__cause__)) == (text == "raise")


@pytest.mark.slow
def test_an_async_function_that_blocks_its_loop_is_an_error(reward_module: ModuleType) -> None:
    limits = dropping(timeout=0.1, max_failed=1.0)
    with (
        RewardRunner({"judge": reward_module.awaited}, limits=limits) as runner,
        pytest.raises(RewardError, match="judge is async and blocks its event loop"),
    ):
        runner(*one_group("block"))


def test_a_function_that_fails_on_the_batch_alone_says_so() -> None:
    def judge(completions: list[str], **columns: Any) -> list[float]:
        if len(completions) > 1:
            raise ValueError("too many")
        return [1.0]

    with pytest.raises(RewardError, match=r"too many .* together, though for none of them alone"):
        RewardRunner({"judge": judge})(*one_group("a", "b"))
    rewards = RewardRunner({"judge": judge}, limits=dropping())(*one_group("a", "b"))
    np.testing.assert_array_equal(rewards.total, [[1.0, 1.0]])


def test_more_failures_than_the_share_stop_the_run(reward_module: ModuleType) -> None:
    with RewardRunner({"judge": reward_module.faulty}, limits=dropping(max_failed=0.5)) as runner:
        runner.check_failures(runner(*one_group("a", "nan")))
        with pytest.raises(
            RewardError, match=r"judge failed on 2 of 3 .* max_failed_rewards is 0\.5"
        ):
            runner.check_failures(runner(*one_group("a", "nan", "raise")))


@pytest.mark.parametrize("returned", [[1.0], 3.0, [1.0, "yes"]])
def test_a_broken_contract_is_an_error_whatever_the_policy(returned: Any) -> None:
    with pytest.raises(RewardError, match="reward function bad returned"):
        RewardRunner({"bad": lambda **_: returned}, limits=dropping())(*one_group("a", "b"))


def test_limits_that_cannot_be_kept_or_do_nothing_are_refused(reward_module: ModuleType) -> None:
    mine = {"mine": reward_module.length}
    with pytest.raises(UserError, match=r"reward_timeout is 5 and mine is a plain function"):
        RewardRunner(mine, limits=RewardLimits(timeout=5.0))
    with pytest.raises(UserError, match=r"reward_batch_timeout is 5 and mine is a plain function"):
        RewardRunner(mine, limits=RewardLimits(batch_timeout=5.0))
    RewardRunner({"tags": gsm8k.tags, "a": reward_module.awaited}, limits=RewardLimits(timeout=5.0))
    with pytest.raises(UserError, match="all reward functions are built in"):
        RewardLimits(timeout=5.0).check_used({"tags": gsm8k.tags})
    with pytest.raises(UserError, match="no plain function of your own"):
        RewardLimits(workers=2).check_used({"tags": gsm8k.tags, "a": reward_module.awaited})
    with pytest.raises(UserError, match="cannot import the reward function mine"):
        RewardRunner({"mine": lambda **_: [0.0]}, limits=RewardLimits(workers=2))


def test_failures_stay_with_their_prompts(reward_module: ModuleType) -> None:
    funcs = {"judge": reward_module.faulty, "penalty": gsm8k.tags}
    rewards = RewardRunner(funcs, limits=dropping())(*one_group("a", "nan"))
    other = RewardRunner(funcs, limits=dropping())(*one_group("raise", "b"))
    picked = rewards.joined(other).of_prompts(np.array([1, 0, 1])).without("penalty")
    np.testing.assert_array_equal(picked.dropped, [[True, False], [False, True], [True, False]])
    assert picked.failed is not None
    assert picked.failed.shape == (1, 3, 2)
