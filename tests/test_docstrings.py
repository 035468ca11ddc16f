"""Public names are documented: what they are, their arguments, errors, shapes and sources."""

import ast
import dataclasses
import functools
import importlib
import inspect
import itertools
import re
import textwrap
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from grpo_eqx import GRPOConfig
from grpo_eqx.common import errors
from grpo_eqx.objective import TokenBatch

from .test_public_face import PACKAGE, PUBLIC

SPECIAL = {"__call__", "__getitem__", "__init__", "__len__"}
"""Methods that are documented although their names begin with an underscore."""
BAD_STARTS = {"It", "Of", "That", "These", "This", "Those", "What"}
VERB = re.compile(r"[A-Z][a-z]+s\b|Called\b")
"""Beginning of a function's docstring: what it does, or when it is called."""
EXPLAINED = 3
"""Parameters that names and types explain. With more, the docstring names each, or has a paragraph
on all, unless it is that of `SETTINGS`."""
SETTINGS = [field.name for field in dataclasses.fields(GRPOConfig)]
SETTINGS += [*TokenBatch._fields, "ratios"]
"""Names that are documented elsewhere, in full or at their end (`clamp` of `kl_clamp`); the ratios
are those of `policy_ratios`."""
ERRORS = {name for name in vars(errors) if name.endswith("Error")} | {"IndexError", "ValueError"}
OF_PAPERS = "grpo_eqx.objective.", "grpo_eqx.recipes."
"""Beginnings of the names of functions that compute published formulas."""
SOURCE = re.compile("arXiv|https?:|TRL")
TIMES = re.compile("timeout|deadline|interval|duration")
"""Parts of the names of times, of which the docstring says the unit."""


class Item(NamedTuple):
    """A public name, or a member of one, with its docstring."""

    name: str
    doc: str
    function: Callable[..., Any] | None = None
    is_property: bool = False

    @property
    def first(self) -> str:
        """The first paragraph."""
        return self.doc.strip().partition("\n\n")[0]


def public_items() -> Iterator[Item]:
    for name in sorted(PUBLIC):
        package, _, own = name.rpartition(".")
        module = importlib.import_module(package)
        value = getattr(module, own, None) or importlib.import_module(name)
        if isinstance(value, types.ModuleType):
            yield Item(name, inspect.getdoc(value) or "")
            of_module = {k: x for k, x in vars(value).items() if not k.startswith("_")}
            for k, x in of_module.items():
                if getattr(x, "__module__", None) == value.__name__:
                    yield from items_of(f"{name}.{k}", x)
        else:
            yield from items_of(name, value)


def items_of(name: str, value: Any) -> Iterator[Item]:
    """Yields a class with its members, a function, or an alias or table."""
    if inspect.isclass(value):
        doc = value.__doc__ or ""
        # dataclasses without a docstring get their signature
        yield Item(name, "" if doc.startswith(f"{value.__name__}(") else doc)
        for base in value.__mro__:
            if base.__module__.startswith("grpo_eqx"):
                yield from members(name, base)
    elif inspect.isfunction(value):
        yield Item(name, inspect.getdoc(value) or "", inspect.unwrap(value))
    else:
        yield Item(name, constants().get(name.rpartition(".")[2], ""))


def members(name: str, kind: type) -> Iterator[Item]:
    """Yields the functions and properties that a class defines itself."""
    yield from fields(name, kind)
    for own, raw in vars(kind).items():
        if own.startswith("_") and own not in SPECIAL:
            continue
        is_property = isinstance(raw, property | functools.cached_property)
        inner = raw if own not in getattr(kind, "__dataclass_fields__", {}) else None
        for attribute in ("fget", "func", "__func__"):
            inner = getattr(inner, attribute, inner)
        inner = inspect.unwrap(inner) if callable(inner) else inner
        if not inspect.isfunction(inner) or str(PACKAGE) not in inner.__code__.co_filename:
            continue  # a field, or a function that a library made
        doc = inspect.getdoc(getattr(kind, own)) if not is_property else inspect.getdoc(raw)
        if own == "__init__" and inner.__doc__ is None:
            doc = inspect.getdoc(kind)
        yield Item(f"{name}.{own}", doc or "", inner, is_property)


def fields(name: str, kind: type) -> Iterator[Item]:
    """Yields the fields that have a docstring below them; others are as their names say."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0].body  # type: ignore[attr-defined]
    for own, doc in assigned(body).items():
        yield Item(f"{name}.{own}", doc)


def assigned(body: list[ast.stmt]) -> dict[str, str]:
    """Returns the docstrings below assignments, by the names that are assigned."""
    found = {}
    for node, below in itertools.pairwise(body):
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(below, ast.Expr):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            found[ast.unparse(target)] = str(getattr(below.value, "value", ""))
    return found


@functools.cache
def constants() -> dict[str, str]:
    """Returns the docstrings below assignments in modules, by the names that are assigned."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        found |= assigned(ast.parse(path.read_text()).body)
    return found


def raised(function: Callable[..., Any]) -> set[str]:
    """Returns the errors of the user that a function's own lines raise."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    raises = [x.exc for x in ast.walk(tree) if isinstance(x, ast.Raise)]
    return {ast.unparse(x.func) for x in raises if isinstance(x, ast.Call)} & ERRORS


def parameters(function: Callable[..., Any]) -> list[str]:
    kinds = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    all_of = inspect.signature(function).parameters.values()
    return [x.name for x in all_of if x.name not in ("self", "cls") and x.kind not in kinds]


def unique() -> list[Item]:
    """Returns each public item once, by its first name: subclasses have their parents' members."""
    found: dict[Any, Item] = {}
    for item in public_items():
        found.setdefault(item.function or item.name, item)
    return list(found.values())


ITEMS = unique()
FUNCTIONS = [(item, item.function) for item in ITEMS if item.function is not None]


def test_there_is_one() -> None:
    assert [item.name for item in ITEMS if not item.doc.strip()] == []


def test_it_begins_with_a_verb_or_a_noun() -> None:
    assert [x.name for x in ITEMS if x.doc and x.first.split()[0] in BAD_STARTS] == []
    for item, _ in FUNCTIONS:
        plain = item.is_property or item.name.endswith(".__init__")
        if not plain and not item.name.startswith("grpo_eqx.recipes."):
            assert VERB.match(item.first), f"{item.name}: {item.first}"


def test_it_has_the_arguments_that_need_words() -> None:
    for item, function in FUNCTIONS:
        names = parameters(function)
        if len(names) > EXPLAINED and "**Arguments:**" not in item.doc:
            missing = [
                name
                for name in names
                if not re.search(rf"\b{name}\b", item.doc)
                and not any(f"_{setting}".endswith(f"_{name}") for setting in SETTINGS)
            ]
            assert not missing, f"{item.name} does not say what {', '.join(missing)} is"


def test_it_names_the_errors_that_are_raised() -> None:
    for item, function in FUNCTIONS:
        missing = {name for name in raised(function) if name not in item.doc}
        assert not missing, f"{item.name} does not say when it raises {', '.join(missing)}"


def test_arrays_have_shapes() -> None:
    for item, function in FUNCTIONS:
        for name, kind in inspect.get_annotations(function).items():
            kinds = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
            bare = any(x is jax.Array or x is np.ndarray for x in kinds)
            assert not bare, f"{item.name} does not say which shape {name} has"


def test_times_have_units() -> None:
    times = [item for item in ITEMS if TIMES.search(item.name.rpartition(".")[2])]
    assert times
    assert [item.name for item in times if not re.search("[Ss]econds|[Hh]ours", item.doc)] == []


def test_formulas_have_a_source() -> None:
    for item, _ in FUNCTIONS:
        if item.name.startswith(OF_PAPERS) and item.name.count(".") == 2:
            assert SOURCE.search(item.doc), item.name
