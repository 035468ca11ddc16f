"""The documentation's page of metrics."""

from ..scripts import load_script


def test_it_is_what_the_registry_says() -> None:
    script = load_script("metrics_page")
    written = script.PAGE.read_text(encoding="utf-8")
    assert written == script.page(), "run python scripts/metrics_page.py"
