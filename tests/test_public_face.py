"""What users import: one list, which the documentation follows."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "grpo_eqx"
COMMANDS = {"assets", "launch"}
"""Folders without anything to import."""


def exports(init: Path) -> set[str]:
    """The names that a package's `__init__` imports as themselves, or defines."""
    package = ".".join(init.parent.relative_to(ROOT).parts)
    names = set()
    for node in ast.walk(ast.parse(init.read_text())):  # also of what is imported at first use
        if isinstance(node, ast.ImportFrom):
            names |= {alias.name for alias in node.names if alias.asname == alias.name}
        elif isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return {f"{package}.{name}" for name in names}


PUBLIC = exports(PACKAGE / "__init__.py").union(
    *(exports(init) for init in PACKAGE.glob("*/__init__.py") if init.parent.name not in COMMANDS)
)


def documents() -> list[Path]:
    return [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.py")]


def test_the_reference_shows_the_public_names_and_no_others() -> None:
    pages = (ROOT / "docs" / "api").glob("*.md")
    shown = [name for page in pages for name in re.findall(r"^::: (\S+)", page.read_text(), re.M)]
    elsewhere = {"grpo_eqx.UserError", "grpo_eqx.cli"}  # in grpo_eqx.errors, and as cli.run
    assert len(shown) == len(set(shown))
    assert set(shown) == PUBLIC - elsewhere


def test_every_public_name_can_be_imported() -> None:
    for name in PUBLIC:
        package, _, own = name.rpartition(".")
        exec(f"from {package} import {own}", {})


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)


def test_the_home_page_agrees_with_the_readme() -> None:
    home, readme = ROOT / "docs" / "index.md", ROOT / "README.md"
    install, test, plan, *real = blocks(home, "console")
    assert set(blocks(readme, "console")) >= {install, test, *real}
    opening = home.read_text().partition("<div markdown>")[2].split("\n\n")[1]
    assert " ".join(opening.split()) in " ".join(readme.read_text().split())

    planning = ROOT / "docs" / "guides" / "planning.md"
    assert plan in blocks(planning, "console")
    (shown,) = blocks(home, "text")
    assert set(shown.splitlines()) <= set(planning.read_text().splitlines())


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.name)
def test_documents_import_only_public_names(path: Path) -> None:
    text = path.read_text()
    for package, names in re.findall(r"from (grpo_eqx[\w.]*) import ([\w, ]+)", text):
        for name in names.split(","):
            assert f"{package}.{name.strip()}" in PUBLIC, f"{package}.{name.strip()}"


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.name)
def test_documents_name_nothing_deeper(path: Path) -> None:
    for name in re.findall(r"`(grpo_eqx\.\w+\.[\w.]+)`", path.read_text()):
        assert name in PUBLIC, name
