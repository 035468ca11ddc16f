"""Tools: functions that the model calls, and the schemas by which it knows them."""

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, get_type_hints

from grpo_eqx.common.errors import UserError, class_name, first_line
from grpo_eqx.common.plain_data import brief

Schema = Mapping[str, Any]
"""JSON schema of a function, as chat templates render it."""


class Tool(NamedTuple):
    """A function that the model can call."""

    name: str
    func: Callable[..., Any]
    """A function, or an `async` one."""
    schema: Schema

    @classmethod
    def of(cls, func: Any, owner: str = "tool") -> "Tool":
        """Reads name, parameters and description from a function's signature and docstring.

        **Arguments:**

        - `func`: the function, or a bound method.
        - `owner`: what to call it in messages.

        Raises `UserError` for what has no schema.
        """
        from transformers.utils.chat_template_utils import (
            DocstringParsingException,
            TypeHintParsingException,
            get_json_schema,
        )

        if not (inspect.isfunction(inspect.unwrap(func)) or inspect.ismethod(func)):
            raise UserError(f"{owner} {brief(func)} {_what_it_is(func)}.")
        called = f"{owner} {func.__name__}"
        if (fault := _fault_of(func)) is not None:
            raise UserError(f"{called} {fault}.")
        try:
            return cls(func.__name__, func, get_json_schema(func))
        except DocstringParsingException as error:
            fix = (
                "describe the tool in one, with each argument under 'Args:'"
                if "no docstring" in str(error)
                else "list each argument under 'Args:', as in 'x: the first number', in Google's "
                "style"
            )
            raise UserError(f"{called}: {_reason(error)}: {fix}.") from error
        except TypeHintParsingException as error:
            raise UserError(
                f"{called}: {_unknown_type(func) or _reason(error)}: annotate each argument with a "
                f"type of JSON, as in x: int."
            ) from error


def make_tools(functions: Any) -> list[Tool]:
    """Returns a user's functions as tools; none for `None`.

    Raises `UserError` for what the model cannot call, and for two tools of one name.
    """
    if functions is None:
        return []
    if (
        callable(functions)
        or isinstance(functions, str | Mapping)
        or not isinstance(functions, Iterable)
    ):
        raise UserError(
            f"tools is {brief(functions)}: pass a list of functions, as in tools=[multiply]."
        )
    tools = [Tool.of(func) for func in functions]
    check_names(tools)
    return tools


def methods_as_tools(environment: object, without: Sequence[str]) -> list[Tool]:
    """Returns the public methods that the class of an environment defines as tools.

    Properties are not evaluated.

    **Arguments:**

    - `environment`: an instance.
    - `without`: names of public methods that the model cannot call.
    """
    kind = type(environment)
    names = [
        name
        for name, _ in inspect.getmembers(kind, predicate=inspect.isfunction)
        if not name.startswith("_") and name not in without
    ]
    owner = f"environment {kind.__name__}: method"
    return [Tool.of(getattr(environment, name), owner) for name in names]


def check_names(tools: Sequence[Tool]) -> None:
    """Raises `UserError` for two tools of one name."""
    ((name, count), *_) = Counter(tool.name for tool in tools).most_common(1) or [("", 0)]
    if count > 1:
        raise UserError(f"{count} tools have the name {name}: give each a name of its own.")


def _what_it_is(func: Any) -> str:
    """Returns why something cannot be a tool, and the fix, as the continuation of a sentence."""
    if inspect.isclass(func):
        return "is a class: pass functions, or pass the class as environment_factory"
    if callable(func):
        return f"is of type {class_name(func)}: wrap it in a function with a docstring"
    return "is not a function: pass functions, as in tools=[multiply]"


def _fault_of(func: Callable[..., Any]) -> str | None:
    """Returns why the model cannot call a function, and the fix, as the continuation of a sentence.

    `None` where it can.
    """
    if inspect.isgeneratorfunction(func) or inspect.isasyncgenfunction(func):
        return "is a generator, and an answer is one text: return it in place of yield"
    for n, each in enumerate(inspect.signature(func).parameters.values()):
        if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD):
            stars = "*" * (1 + (each.kind is each.VAR_KEYWORD))
            return (
                f"takes {stars}{each.name}, whose names the model cannot know: name each argument"
            )
        if n == 0 and each.name == "self":
            return "takes self: pass the method of an object, as in tools=[MyTools().look]"
        if each.kind is each.POSITIONAL_ONLY:
            return (
                f"takes {each.name} by position only, and arguments are passed by name: remove the "
                f"/ from its signature"
            )
    return None


def _unknown_type(func: Callable[..., Any]) -> str | None:
    """Describes the first argument whose type JSON does not have; `None` where there is none."""
    from transformers.utils.chat_template_utils import TypeHintParsingException, get_json_schema

    def probe(x: Any) -> None:
        """Has an argument.

        Args:
            x: An argument.
        """

    for name, hint in get_type_hints(func).items():
        probe.__annotations__ = {"x": hint}
        try:
            get_json_schema(probe)
        except TypeHintParsingException:
            if name != "return":
                return f"argument {name} has the type {inspect.formatannotation(hint)}"
    return None


def _reason(error: Exception) -> str:
    """Returns what transformers says of a function, which it names first, without that name."""
    said = first_line(error).rstrip("!.").removeprefix("Cannot generate JSON schema for ")
    return said.partition(" because ")[2] or said
