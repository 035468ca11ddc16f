"""The guide's table of faults names tests that exist."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
GUIDE = TESTS.parent / "docs" / "guides" / "reliability.md"


def test_every_test_of_the_table_exists() -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", GUIDE.read_text())
    assert len(named) > 25
    for file, test in named:
        assert f"def {test}(" in (TESTS / file).read_text(), f"{file}::{test}"
