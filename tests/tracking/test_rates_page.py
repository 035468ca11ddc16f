"""The page on planning has the rates that plans divide by."""

from ..scripts import load_script


def test_the_table_is_that_of_the_rates() -> None:
    script = load_script("table_of_rates")
    page = script.PAGE.read_text()
    assert script.with_table(page) == page, "run: python scripts/table_of_rates.py"
