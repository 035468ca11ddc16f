"""Tests that pages name exist."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
DOCS = TESTS.parent / "docs"
GUIDE = DOCS / "guides" / "reliability.md"
PAGES = [GUIDE, *sorted(DOCS.glob("how_to/*.md"))]


def named_tests(page: Path) -> list[tuple[str, str]]:
    return re.findall(r"`(?:tests/)?([\w/]+\.py)::(\w+)`", page.read_text())


def test_the_guide_has_a_test_for_every_fault() -> None:
    assert len(named_tests(GUIDE)) > 25


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_test_that_is_named_exists(page: Path) -> None:
    for file, test in named_tests(page):
        assert f"def {test}(" in (TESTS / file).read_text(), f"{file}::{test}"
