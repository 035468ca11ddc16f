"""Classes of environments are read once, and their instances used again."""

from collections.abc import Iterator
from typing import Any

import pytest

from grpo_eqx import UserError
from grpo_eqx.environments.calls import Calls
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


@pytest.fixture
def calls() -> Iterator[Calls]:
    Counter.made = []
    runner = Calls(timeout=20.0)
    yield runner
    runner.close()


def test_instances_are_used_again_and_closed_in_the_end(calls: Calls) -> None:
    environments = Environments(Counter, [], calls)
    kind = environments.kind_of({"start": 3})
    first, second = environments.take(kind), environments.take(kind)
    assert first is not second
    environments.give_all_back()
    assert {id(environments.take(kind)) for _ in range(2)} == {id(first), id(second)}
    environments.close()
    assert len(Counter.made) == 2
    assert all(each.is_closed for each in Counter.made)


def test_one_in_which_a_call_still_runs_is_not_used_again(calls: Calls) -> None:
    environments = Environments(Counter, [], calls)
    kind = environments.kind_of({})
    lost = environments.take(kind)
    environments.give_all_back(lost=[id(lost)])
    assert environments.take(kind) is not lost


def test_its_tools_are_those_of_all_and_its_methods(calls: Calls) -> None:
    kind = EnvironmentKind(Counter, make_tools([double]))
    environment = kind.take()
    tools = {tool.name: tool for tool in kind.tools_of(environment)}
    assert set(tools) == {"double", "increase"}
    kind.reset_call(environment, {"start": 4, "other": 1}).func(start=4)
    assert tools["increase"].func(by=2) == 6
    assert kind.has_reward


def test_reset_gets_the_columns_that_it_takes() -> None:
    Counter.made = []
    kind = EnvironmentKind(Counter)
    environment = kind.take()
    assert kind.reset_call(environment, {"start": 4, "other": 1}).arguments == {"start": 4}

    class TakesAll(Counter):
        def reset(self, **row: Any) -> None: ...

    every = EnvironmentKind(TakesAll)
    row = {"start": 4, "other": 1}
    assert every.reset_call(every.take(), row).arguments == row


def test_rows_name_one_of_several(calls: Calls) -> None:
    class Other(Counter):
        pass

    environments = Environments({"one": Counter, "two": Other}, [], calls)
    assert environments.kind_of({"environment": "two"}).cls is Other
    with pytest.raises(UserError, match="column environment of a row is 'three': use one or two"):
        environments.kind_of({"environment": "three"})
    with pytest.raises(UserError, match="column environment of a row is None"):
        environments.kind_of({})


def test_columns_that_reset_needs_must_be_there() -> None:
    Counter.made = []
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
def test_what_is_not_an_environment_is_refused(factory: Any, said: str, calls: Calls) -> None:
    with pytest.raises(UserError, match=said):
        Environments(factory, [], calls)


def test_a_tool_and_a_method_of_one_name_are_refused(calls: Calls) -> None:
    class Doubler(Counter):
        def double(self, x: int) -> int:
            """Doubles.

            Args:
                x: A number.
            """
            return 2 * x

    with pytest.raises(UserError, match="2 tools have the name double"):
        Environments(Doubler, make_tools([double]), calls)
