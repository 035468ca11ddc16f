"""Calls run beside each other or in order, and end in time."""

import asyncio
import contextvars
import threading
from typing import Any

import pytest

from grpo_eqx.environments.calls import Call, Calls


@pytest.fixture
def calls() -> Any:
    runner = Calls(timeout=20.0)
    yield runner
    runner.close()


async def echo(x: int) -> int:
    await asyncio.sleep(0)
    return x


def test_outcomes_have_the_order_of_the_calls(calls: Calls) -> None:
    """Each waits for the next one, so that they end from the last to the first."""
    ended = [threading.Event() for _ in range(4)]
    ended[3].set()

    def plain(i: int) -> int:
        assert ended[i + 1].wait(20)
        ended[i].set()
        return i

    made = calls.together([Call(plain, {"i": i}) for i in range(3)] + [Call(echo, {"x": 3})])
    assert [outcome.result for outcome in made.result(20)] == [0, 1, 2, 3]


def test_calls_that_change_one_environment_run_one_after_the_other(calls: Calls) -> None:
    done: list[int] = []

    def plain(i: int) -> list[int]:
        seen = list(done)
        done.append(i)
        return seen

    async def awaited(i: int) -> list[int]:
        await asyncio.sleep(0)
        return plain(i)

    made = calls.in_order([Call(awaited if i % 2 else plain, {"i": i}) for i in range(5)])
    assert [outcome.result for outcome in made.result(20)] == [list(range(i)) for i in range(5)]


def test_what_a_call_raises_is_its_outcome(calls: Calls) -> None:
    def plain() -> None:
        raise SystemExit(3)

    async def awaited() -> None:
        raise KeyError("lost")

    def wrong(x: int) -> int:
        return x

    made = calls.together([Call(plain, {}), Call(awaited, {}), Call(wrong, {"y": 1})]).result(20)
    assert [type(outcome.error) for outcome in made] == [SystemExit, KeyError, TypeError]


def test_a_call_that_takes_too_long_is_left_behind() -> None:
    runner, released = Calls(timeout=0.05), threading.Event()

    async def forever() -> None:
        await asyncio.Event().wait()

    made = runner.together([Call(released.wait, {}), Call(forever, {}), Call(echo, {"x": 1})])
    late, never, fine = made.result(20)
    released.set()
    assert isinstance(late.error, TimeoutError)
    assert isinstance(never.error, TimeoutError)
    assert fine.result == 1
    runner.close()


def test_a_plain_function_that_returns_a_coroutine_is_awaited(calls: Calls) -> None:
    (outcome,) = calls.together([Call(lambda: echo(5), {})]).result(20)
    assert outcome.result == 5


def test_a_runner_can_be_used_again_after_it_was_closed(calls: Calls) -> None:
    assert calls.together([Call(echo, {"x": 1})]).result(20)[0].result == 1
    calls.close()
    assert calls.together([Call(echo, {"x": 2})]).result(20)[0].result == 2


def test_the_users_context_is_that_of_the_caller(calls: Calls) -> None:
    """A tool reads the context variables that its caller set."""
    variable = contextvars.ContextVar("variable", default="none")
    variable.set("mine")
    (outcome,) = calls.together([Call(variable.get, {})]).result(20)
    assert outcome.result == "mine"
