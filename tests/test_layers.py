"""No module imports from a layer above its own."""

import ast
import graphlib
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "grpo_eqx"
PAGE = Path(__file__).parents[1] / "docs" / "project" / "architecture.md"
TABLE = PAGE.read_text().partition("| path | role |\n")[2].partition("\n\n")[0]
LAYERS = [
    {
        name.strip(" `").removesuffix("/").removesuffix(".py")
        for name in row.split("|")[1].split(",")
    }
    for row in TABLE.splitlines()[1:]
]
"""The rows of the documentation's table, top to bottom."""


def layer(part: str) -> int:
    """The layer of a module or sub-package of `grpo_eqx`."""
    return next(i for i, names in enumerate(LAYERS) if part in names)


def imported(path: Path) -> set[str]:
    """The parts of `grpo_eqx` that a file imports from."""
    parts = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("grpo_eqx"):
            below = (node.module or "").split(".")[1:2]
            parts |= set(below) or {alias.name for alias in node.names}
    return parts


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: p.name)
def test_imports_point_downwards(path: Path) -> None:
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    above = {part for part in imported(path) if layer(part) > layer(own)}
    assert not above, f"{path.name} (layer {layer(own)}) imports from {above}"


def test_the_table_has_every_module_once_and_no_others() -> None:
    listed = sorted(name for names in LAYERS for name in names)
    files = (path.relative_to(PACKAGE).parts[0] for path in PACKAGE.rglob("*.py"))
    assert listed == sorted({name.removesuffix(".py") for name in files})


def test_the_page_names_files_that_exist() -> None:
    folders = "grpo_eqx|tests|scripts|docs|devdocs"
    for name in re.findall(rf"`((?:{folders})/[\w/.]*)`", PAGE.read_text()):
        assert (PACKAGE.parent / name).exists(), name


def test_no_modules_import_each_other_in_a_circle() -> None:
    """As far as imports at the top of a module go; others happen in calls."""
    modules = {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path
        for path in PACKAGE.rglob("*.py")
    }
    modules = {name.removesuffix(".__init__"): path for name, path in modules.items()}
    graph = {
        name: {
            full if (full := f"{node.module}.{alias.name}") in modules else str(node.module)
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("grpo_eqx")
            for alias in node.names
        }
        for name, path in modules.items()
    }
    graphlib.TopologicalSorter(graph).prepare()


def test_nothing_outside_models_knows_a_family() -> None:
    """The interface and the registry are all that others see of a model."""
    for path in PACKAGE.rglob("*.py"):
        if path.relative_to(PACKAGE).parts[0] != "models":
            assert not re.search(r"\bmodels\.qwen|import Qwen", path.read_text()), path.name
