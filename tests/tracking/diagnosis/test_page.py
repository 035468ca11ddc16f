"""The page on sick runs has the table of the rules as they are."""

import importlib.util
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "scripts" / "table_of_rules.py"


def test_the_table_is_that_of_the_rules() -> None:
    spec = importlib.util.spec_from_file_location("table_of_rules", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    page = script.PAGE.read_text()
    assert script.with_table(page) == page, "run: python scripts/table_of_rules.py"
