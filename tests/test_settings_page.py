"""The documentation's page of settings."""

import dataclasses
import importlib.util
import re
from pathlib import Path

from grpo_eqx import GRPOConfig

SCRIPT = Path(__file__).parents[1] / "scripts" / "settings_page.py"


def test_it_is_what_the_config_says() -> None:
    spec = importlib.util.spec_from_file_location("settings_page", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    written = script.PAGE.read_text(encoding="utf-8")
    assert written == script.page(), "run python scripts/settings_page.py"
    entries = re.findall(r"^`\w+`\{ #(\w+) \}", written, re.MULTILINE)
    assert entries == [field.name for field in dataclasses.fields(GRPOConfig)]
