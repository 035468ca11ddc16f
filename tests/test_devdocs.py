"""The derivations name files and tests that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "devdocs").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_they_name_files_that_exist(page: Path) -> None:
    text = page.read_text()
    for name in re.findall(r"`((?:grpo_eqx|tests)/[\w/.]*)", text):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"\]\((\w+\.md)", text):
        assert (page.parent / name).exists(), name


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_they_name_tests_that_exist(page: Path) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page.read_text())
    assert named or page.stem == "README"
    for path, test in named:
        assert f"def {test}(" in (ROOT / path).read_text(), f"{path}::{test}"


def test_the_list_has_every_page() -> None:
    listed = set(re.findall(r"\]\((\w+\.md)\)", (ROOT / "devdocs" / "README.md").read_text()))
    assert listed == {page.name for page in PAGES} - {"README.md"}
