"""Classes of environments are read once, and their instances used again."""

from typing import Any

import pytest

from grpo_eqx import UserError
from grpo_eqx.environments.pool import EnvironmentKind, Environments
from grpo_eqx.environments.tools import make_tools


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
    kind = environments.kinds[None]
    first, second = kind.take(), kind.take()
    assert first is not second
    for each in (first, second):
        environments.give_back(each)
    assert {id(kind.take()) for _ in range(2)} == {id(first), id(second)}
    environments.close()  # also what a completion still uses
    assert len(Counter.made) == 2
    assert all(each.is_closed for each in Counter.made)


def test_a_lost_one_is_closed_and_not_used_again() -> None:
    environments = Environments(factory=Counter)
    kind = environments.kinds[None]
    lost = kind.take()
    environments.give_back(lost, is_lost=True)
    assert kind.take() is not lost
    environments.close()
    assert lost.is_closed


def test_its_tools_are_those_of_all_and_its_methods() -> None:
    kind = EnvironmentKind(Counter, make_tools([double]))
    environment = kind.take()
    tools = {tool.name: tool for tool in kind.tools_of(environment)}
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
    with pytest.raises(UserError, match="reset needs start, and the data has the columns answer"):
        kind.check_columns(["answer"])


def fails() -> None:
    raise OSError("no display")


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        ("Counter", "environment_factory is 'Counter': pass a class"),
        ({}, "is an empty dict"),
        ({"a": 3}, r"environment_factory\['a'\] is 3: pass a class"),
        (fails, "raised OSError: no display: pass a class"),
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
