"""The documentation's page of metrics."""

import importlib.util
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "metrics_page.py"


def test_it_is_what_the_registry_says() -> None:
    spec = importlib.util.spec_from_file_location("metrics_page", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    written = script.PAGE.read_text(encoding="utf-8")
    assert written == script.page(), "run python scripts/metrics_page.py"
