"""Writes the documentation's page of settings from the config's fields: their groups, which are
comments in its source, and their docstrings.

python scripts/settings_page.py
"""

import ast
import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

from grpo_eqx import GRPOConfig
from grpo_eqx.settings.types import values_of

PAGE = Path(__file__).parents[1] / "docs" / "guides" / "settings.md"
INTRODUCTION = """\
# Settings

<!-- Made by scripts/settings_page.py from grpo_eqx/settings/config.py: change it there. -->

The fields of [`GRPOConfig`][grpo_eqx.GRPOConfig], with their defaults, their values and their
meaning. On the command line, `num_generations` is `--num-generations`; in a file, it is a key of
YAML or JSON. Fields that TRL has too keep TRL's names. Where `None` stands for a rule, the
`config.json` in a run's folder has what the run used. A setting that would have no effect is
refused.
"""
NAMES = sorted((x.name for x in dataclasses.fields(GRPOConfig)), key=len, reverse=True)


def page() -> str:
    """Returns the page, in Markdown."""
    parts = [INTRODUCTION]
    for title, names in groups():
        parts.append(f"## {title}\n")
        parts += [entry(name) for name in names]
    return "\n".join(parts)


def groups() -> Iterator[tuple[str, list[str]]]:
    """Yields the title of each group of fields, and their names."""
    body = inspect.getsource(GRPOConfig).partition("\n    def ")[0]
    for group in re.split(r"^    # ", body, flags=re.MULTILINE)[1:]:
        title, _, fields = group.partition("\n")
        yield title, re.findall(r"^    ([a-z]\w+): .+ = ", fields, re.MULTILINE)


def entry(name: str) -> str:
    """Returns the entry of a setting in its group's list of definitions."""
    default = GRPOConfig.__dataclass_fields__[name].default
    shown = f'"{default}"' if isinstance(default, str) else str(default)
    values = values_of(GRPOConfig, name).removeprefix("use ").replace("*", r"\*")
    return (
        f"`{name}`{{ #{name} }} `= {shown}`{{ .default }}\n"
        f":   {coded(docstrings()[name])}\n\n"
        f"    Values: {values}.\n"
    )


def docstrings() -> dict[str, str]:
    """Returns the docstring of each field, in one line."""
    (definition,) = ast.parse(inspect.getsource(GRPOConfig)).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for field, text in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            assert isinstance(field.target, ast.Name)
            assert isinstance(text.value, ast.Constant)
            found[field.target.id] = " ".join(str(text.value.value).split())
    return found


def coded(text: str) -> str:
    """Returns a text for consoles with the settings of several words in code style, as links."""
    names = "|".join(name for name in NAMES if "_" in name)
    return re.sub(rf"(?<![-\w])({names})\b", r"[`\1`](#\1)", text)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
