"""Classes of environments are read once, and their instances used again."""

import asyncio
import itertools
import threading
from typing import Any

import pytest

from grpo_eqx import UserError
from grpo_eqx.environments.environment import Environment
from grpo_eqx.environments.pool import EnvironmentKind, Environments
from grpo_eqx.environments.tools import make_tools
from grpo_eqx.rewards.contract import read_rewards


class Counter:
    """Counts."""

    made: list["Counter"]
    is_closed = False

    def __init__(self) -> None:
        self.value = 0
        type(self).made.append(self)

    def reset(self, start: int, step: int = 1) -> None:
        self.value = start

    def increase(self, by: int) -> int:
        """Adds.

        Args:
            by: How much.
        """
        self.value += by
        return self.value

    def get_reward(self) -> float:
        return float(self.value)

    async def close(self) -> None:
        self.is_closed = True


def double(x: int) -> int:
    """Doubles.

    Args:
        x: A number.
    """
    return 2 * x


@pytest.fixture(autouse=True)
def none_made() -> None:
    Counter.made = []


def test_instances_are_used_again_and_closed_in_the_end() -> None:
    environments = Environments(factory=Counter)
    kinds = [environments.kinds[None]] * 2
    first, second = (outcome.result for outcome in environments.take(kinds))
    assert first is not second
    for each in (first, second):
        environments.give_back(each)
    again = {id(outcome.result) for outcome in environments.take(kinds)}
    assert again == {id(first), id(second)}
    environments.close()  # also what a completion still uses
    assert len(Counter.made) == 2
    assert all(each.is_closed for each in Counter.made)


def test_a_lost_one_is_closed_and_not_used_again() -> None:
    environments = Environments(factory=Counter)
    kinds = [environments.kinds[None]]
    (lost,) = environments.take(kinds)
    environments.lose(lost.result)
    environments.give_back(lost.result)
    assert environments.take(kinds)[0].result is not lost.result
    environments.close()
    assert lost.result.is_closed


def test_what_their_own_functions_do_wrong_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    class Slow(Counter):
        def get_reward(self) -> float:
            threading.Event().wait(30.0)
            return 0.0

        async def close(self) -> None:
            raise OSError("no container")

    environments = Environments(factory=Slow, timeout=0.2)
    kinds = [environments.kinds[None]] * 2
    own = [outcome.result for outcome in environments.take(kinds)]
    (reward,) = environments.own_rewards.values()

    async def rewards() -> Any:
        return await reward(environments=own)  # type: ignore[misc]

    late = "raised TimeoutError: it took more than 0.2 s (tool_timeout)"
    assert read_rewards(asyncio.run(rewards()), 2) == [late, late]
    environments.close()
    said = capfd.readouterr().err
    assert "warning: close of environment Slow raised OSError: no container (test_pool.py, " in said


def test_one_that_cannot_be_made_is_an_error_of_its_completion() -> None:
    numbers = itertools.count()

    def fails_at_last() -> Counter:
        if next(numbers) == 2:
            raise OSError("no container")
        return Counter()

    environments = Environments(factory=fails_at_last)
    outcomes = environments.take([environments.kinds[None]] * 3)
    assert [outcome.error is None for outcome in outcomes] == [True, True, False]
    assert "no container" in str(outcomes[2].error)
    shared = Counter()
    (_, second) = (one := Environments(factory=lambda: shared)).take([one.kinds[None]] * 2)
    assert "returned the same environment twice" in str(second.error)
    environments.close()
    one.close()


def test_its_tools_are_those_of_all_and_its_methods() -> None:
    kind = EnvironmentKind(Counter, make_tools([double]))
    environment = kind.take()
    tools = kind.tools_of(environment)
    assert set(tools) == {"double", "increase"}
    kind.reset_call(environment, {"start": 4, "other": 1}).func(start=4)
    assert tools["increase"].func(by=2) == 6
    assert kind.has_reward


def test_reset_gets_the_columns_that_it_takes() -> None:
    kind = EnvironmentKind(Counter)
    environment = kind.take()
    assert kind.reset_call(environment, {"start": 4, "other": 1}).arguments == {"start": 4}

    class TakesAll(Counter):
        def reset(self, **row: Any) -> None: ...

    every = EnvironmentKind(TakesAll)
    row = {"start": 4, "other": 1}
    assert every.reset_call(every.take(), row).arguments == row


def test_rows_name_one_of_several() -> None:
    class Other(Counter):
        pass

    environments = Environments(factory={"one": Counter, "two": Other})
    kind = environments.kind_of({"environment": "two"})
    assert kind is not None
    assert kind.cls is Other
    environments.check_columns(["start", "environment"])


def test_columns_that_reset_needs_must_be_there() -> None:
    kind = EnvironmentKind(Counter)
    kind.check_columns(["start", "answer"])
    with pytest.raises(
        UserError, match="needs start, and gets prompt and answer: add the column to the"
    ):
        kind.check_columns(["answer"])
    with pytest.raises(
        UserError, match="needs start, and gets prompt and seed: pass train_data with"
    ):
        kind.check_columns(["seed"])
    with pytest.raises(UserError, match="needs start, and gets prompt: give rows"):
        kind.check_columns([], "give rows")


def fails() -> None:
    raise OSError("no display")


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        ("Counter", "environment_factory is 'Counter': pass a class"),
        ({}, "is an empty dict"),
        ([Counter], "pass a dict of classes by name, of which each problem names one in a column"),
        (lambda: Counter, "Counter'>: return an environment, or pass the class itself"),
        ({"a": 3}, r"environment_factory\['a'\] is 3: pass a class"),
        (fails, r"raised OSError: no display \(test_pool.py, line \d+\): fix it"),
        (
            type("Half", (Environment,), {"reset": fails}),
            "Half'> raised TypeError: .*: define step",
        ),
        (
            type("Bare", (Environment,), {"reset": fails, "step": lambda self, action: None}),
            "environment Bare: step has no argument text, nor ids: name it",
        ),
        (type("Idle", (), {"reset": fails}), "no public method besides reset that the model could"),
        (lambda: None, "returned None: return an environment"),
        (lambda: Counter, "return an environment"),
        (lambda x: x, "that needs no arguments"),
        (type("Empty", (), {}), "environment Empty has no method reset: define one"),
    ],
)
def test_what_is_not_an_environment_is_refused(factory: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        Environments(factory=factory)


def test_a_tool_and_a_method_of_one_name_are_refused() -> None:
    class Doubler(Counter):
        def double(self, x: int) -> int:
            """Doubles.

            Args:
                x: A number.
            """
            return 2 * x

    with pytest.raises(UserError, match="2 tools have the name double"):
        Environments([double], Doubler)
