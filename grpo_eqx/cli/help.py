"""Help on a run's many flags: essential flags on a screen, and all flags by group."""

import ast
import dataclasses
import functools
import inspect
import itertools
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from grpo_eqx.common.errors import UserError
from grpo_eqx.settings.types import choices_of, noun_of

ESSENTIALS = (
    "topology", "compare", "search", "expected_completion_length", "price_per_device_hour", "model",
    "data", "recipe", "config", "reward_funcs", "prompts_per_step", "num_generations",
    "max_completion_length", "steps", "learning_rate", "mesh", "micro_batch_size_per_device",
    "output_dir", "resume", "print_config",
)  # fmt: skip
"""Flags that `--help` shows, if a command has them."""

_OF_RUNS = {"reward_funcs", "learning_rate", "output_dir", "resume", "print_config"}
"""Essential flags that `grpo-eqx plan` leaves out, because they do not affect a plan."""

_OWN_GROUP = "command"
"""Group of the flags that are not settings."""
_WIDEST = 100
_FIRST_SENTENCE = re.compile(r".*?(?=[;.](?: |$)|: (?![a-z]+ \()|$)")


def asks_for_help(arguments: Sequence[str]) -> bool:
    """Returns whether arguments ask for help."""
    return any(each.partition("=")[0] in ("-h", "--help", "--help-all") for each in arguments)


def show_help(
    flags: type, command: str, about: str, arguments: Sequence[str], own: Sequence[str] = ()
) -> NoReturn:
    """Prints the help that arguments ask for, and ends the process.

    **Arguments:**

    - `flags`: the dataclass of flags.
    - `command`, `about`: the command as it is typed, and what it does.
    - `arguments`: `--help` for essential flags, `--help GROUP` for a group, or `--help-all`.
    - `own`: more essential flags.

    Raises `UserError` for an unknown group.
    """
    from grpo_eqx.tracking.safe_console import safe_console

    groups, wanted = groups_of(flags), _wanted(arguments)
    console = safe_console(width=min(safe_console().width, _WIDEST), highlight=False)
    if wanted is not None and wanted not in groups:
        raise UserError(f"--help has no group {wanted!r}: use one of {', '.join(groups)}.")
    if wanted is None:
        paragraphs = [" ".join(each.split()) for each in about.strip().split("\n\n")]
        usage = f"usage: {command} [--FLAG VALUE ...]"
        shown_about = paragraphs if "--help-all" in arguments else paragraphs[:1]
        console.print("\n\n".join([usage, *shown_about]) + "\n")
    shown = {name: rows for name, rows in groups.items() if wanted in (None, name)}
    if wanted is None and "--help-all" not in arguments:
        known = set(_all(groups))
        known -= _OF_RUNS if "topology" in known else set()
        shown = {"": [name for name in dict.fromkeys([*own, *ESSENTIALS]) if name in known]}
    for name, rows in shown.items():
        if name:
            console.print(name, style="bold")
        console.print(_table(flags, rows, brief=not name))
    if len(shown) == 1:
        console.print(f"\n{len(_all(groups))} flags in all: --help-all")
        console.print(f"by group: --help {', '.join(groups)}")
    raise SystemExit(0)


def _all(groups: Mapping[str, Sequence[str]]) -> list[str]:
    return [name for rows in groups.values() for name in rows]


def _wanted(arguments: Sequence[str]) -> str | None:
    """Returns the group after `--help`, if any."""
    words = [word for each in arguments for word in each.split("=", 1)]
    for flag, value in itertools.pairwise(words):
        if flag in ("-h", "--help") and not value.startswith("-"):
            return value
    return None


def groups_of(flags: type) -> dict[str, list[str]]:
    """Returns the flags' names by group, as comments in their classes name the groups."""
    groups: dict[str, list[str]] = {}
    for kind in _bases(flags):
        fields = {field.lineno: name for name, (field, _) in _documented(kind).items()}
        group = _OWN_GROUP
        for number, line in enumerate(_source(kind).splitlines(), start=1):
            if comment := re.fullmatch(r"    # (\w+).*", line):
                group = comment[1].lower()
            elif number in fields and fields[number] not in _all(groups):
                groups.setdefault(group, []).append(fields[number])
    return groups


def _bases(flags: type) -> list[type]:
    """Returns the dataclasses that define fields, first the class of the settings."""
    own = [kind for kind in flags.__mro__ if "__annotations__" in vars(kind)]
    return [kind for kind in reversed(own) if dataclasses.is_dataclass(kind)]


def _table(flags: type, names: Sequence[str], *, brief: bool) -> Any:
    from rich.table import Table
    from rich.text import Text

    documented = {name: x for kind in _bases(flags) for name, x in _documented(kind).items()}
    defaults = {field.name: field.default for field in dataclasses.fields(flags)}
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column()
    for name in names:
        value = placeholder(flags, name)
        flag = f"  --{name.replace('_', '-')} {value}".rstrip()
        _, text = documented[name]
        if brief:
            text = _FIRST_SENTENCE.match(text)[0]  # type: ignore[index]  # it matches any text
        table.add_row(Text(flag), Text(_explained(flags, name, text, defaults[name])))
    return table


def placeholder(flags: type, name: str) -> str:
    """Returns the placeholder of a flag's value: INT, FLOAT, TEXT or CHOICE; "" for a switch."""
    return "CHOICE" if choices_of(flags, name) else noun_of(flags, name)


def _explained(flags: type, name: str, text: str, default: Any) -> str:
    choices = ", ".join(map(str, choices_of(flags, name)))
    if isinstance(default, tuple):
        default = " ".join(map(str, default))
    shown = "" if default in (None, False, "") else f"default: {default}"
    more = "; ".join(part for part in (choices, shown) if part)
    return f"{text} ({more})".strip() if more else text


@functools.cache
def _documented(kind: type) -> Mapping[str, tuple[ast.AnnAssign, str]]:
    """Returns the fields that a class defines, each with its docstring, if any, in one line."""
    (node,) = ast.parse(_source(kind)).body
    assert isinstance(node, ast.ClassDef)
    return {
        field.target.id: (field, " ".join(_text(after).split()))
        for field, after in itertools.pairwise([*node.body, ast.Pass()])
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }


def _text(statement: ast.stmt) -> str:
    """Returns the text of a docstring; "" for another statement."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return str(statement.value.value)
    return ""


def _source(kind: type) -> str:
    try:
        return textwrap.dedent(inspect.getsource(kind))
    except (OSError, TypeError):  # a class made at run time
        return "class Unknown: pass"
