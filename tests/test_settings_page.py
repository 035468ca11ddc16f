"""The documentation's page of settings."""

import dataclasses
import re

from grpo_eqx import GRPOConfig

from .scripts import load_script


def test_it_is_what_the_config_says() -> None:
    script = load_script("settings_page")
    written = script.PAGE.read_text(encoding="utf-8")
    assert written == script.page(), "run python scripts/settings_page.py"
    entries = re.findall(r"^`\w+`\{ #(\w+) \}", written, re.MULTILINE)
    assert entries == [field.name for field in dataclasses.fields(GRPOConfig)]
