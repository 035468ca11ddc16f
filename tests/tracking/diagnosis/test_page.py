"""The page on sick runs has the table of the rules as they are."""

from ...scripts import load_script


def test_the_table_is_that_of_the_rules() -> None:
    script = load_script("table_of_rules")
    page = script.PAGE.read_text()
    assert script.with_table(page) == page, "run: python scripts/table_of_rules.py"
