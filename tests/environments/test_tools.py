"""Functions as tools: what the model is told of them, and what is refused."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from grpo_eqx import UserError
from grpo_eqx.environments.tools import make_tools, methods_as_tools


def multiply(a: int, b: float = 2.0) -> float:
    """Multiplies two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


async def search(query: str) -> str:
    """Searches a corpus.

    Args:
        query: What to look for.
    """
    return query


class Counter:
    """An environment."""

    def reset(self, start: int) -> None:
        self.value = start

    def get_reward(self) -> float:
        return float(self.value)

    def increase(self, by: int) -> str:
        """Adds to the counter.

        Args:
            by: How much to add.
        """
        self.value += by
        return str(self.value)

    @property
    def loud(self) -> str:
        raise AssertionError("evaluated")

    def _hidden(self) -> None: ...


def test_a_function_with_a_cache_is_a_tool() -> None:
    (tool,) = make_tools([functools.lru_cache(multiply)])
    assert tool.schema == make_tools([multiply])[0].schema


def test_a_schema_has_names_types_and_descriptions() -> None:
    first, second = make_tools([multiply, search])
    assert (first.name, second.name) == ("multiply", "search")
    function = first.schema["function"]
    assert function["description"] == "Multiplies two numbers."
    assert function["parameters"]["properties"]["a"] == {
        "type": "integer",
        "description": "The first number.",
    }
    assert function["parameters"]["required"] == ["a"]
    assert make_tools(None) == []


def test_public_methods_of_an_environment_are_its_tools() -> None:
    environment = Counter()
    (tool,) = methods_as_tools(environment, without=("reset", "get_reward"))
    environment.reset(3)
    assert tool.name == "increase"
    assert tool.func(by=2) == "5"
    assert "self" not in tool.schema["function"]["parameters"]["properties"]


def no_docstring(x: int) -> int:
    return x


def no_type(x) -> int:  # type: ignore[no-untyped-def]
    """Doubles.

    Args:
        x: A number.
    """
    return int(x)


def no_argument(x: int) -> int:
    """Doubles."""
    return x


def by_position(x: int, /) -> int:
    """Doubles.

    Args:
        x: A number.
    """
    return 2 * x


def yields(x: int) -> Iterator[int]:
    """Counts.

    Args:
        x: How far.
    """
    yield from range(x)


def of_sets(x: set[str]) -> None:
    """Sorts.

    Args:
        x: Texts.
    """


def starred(*numbers: int) -> int:
    """Adds.

    Args:
        numbers: The numbers.
    """
    return sum(numbers)


@pytest.mark.parametrize(
    ("tools", "said"),
    [
        ([no_docstring], "tool no_docstring: it has no docstring: describe"),
        ([no_type], "tool no_type: Argument x is missing a type hint .*annotate each argument"),
        ([no_argument], "tool no_argument: .*no description for the argument 'x': list each"),
        ([starred], r"tool starred takes \*numbers, whose names the model cannot know"),
        ([multiply, multiply], "2 tools have the name multiply: give each a name of its own"),
        (5, "tools is 5: pass a list of functions"),
        (multiply, "tools is <function multiply .*pass a list of functions"),
        ([Counter], "is a class: pass functions, or pass the class as environment_factory"),
        ([functools.partial(multiply, 1)], "is of type partial: wrap it in a function"),
        ([len], "wrap it in a function with a docstring"),
        ([Counter.increase], r"tool increase takes self: pass the method of an object, as in"),
        ([by_position], "by_position takes x by position only, .*: remove the / from its sig"),
        ([yields], "tool yields is a generator, and an answer is one text: return it"),
        ([of_sets], r"tool of_sets: argument x has the type set\[str\]: annotate each argument"),
        (["multiply"], "is not a function: pass functions"),
        ([3], "is not a function: pass functions"),
    ],
)
def test_what_the_model_cannot_call_is_refused(tools: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        make_tools(tools)


def test_a_method_without_a_docstring_is_refused_with_its_class() -> None:
    kind: Callable[[], Any] = type("Maze", (), {"reset": no_docstring, "step": no_docstring})
    with pytest.raises(UserError, match="environment Maze: method no_docstring"):
        methods_as_tools(kind(), without=("reset",))
