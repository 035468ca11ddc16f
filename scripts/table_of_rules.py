"""Writes the table of sicknesses into their page: `python scripts/table_of_rules.py`."""

import dataclasses
import re
from pathlib import Path

from generated_part import with_part

from grpo_eqx import GRPOConfig
from grpo_eqx.tracking.diagnosis import RULES

PAGE = Path(__file__).parents[1] / "docs" / "guides" / "sick_runs.md"


def with_table(page: str) -> str:
    """Returns the page with the table of all rules between its two marks."""
    rows = [
        f"| `{rule.name}` | {rule.symptom} | {rule.cause} | {_quoted(rule.advice)} |"
        for rule in RULES
        if rule.kind == "sickness"
    ]
    notes = [
        f"| `{rule.name}` | {rule.symptom} | {rule.cause} |"
        for rule in RULES
        if rule.kind == "note"
    ]
    table = [
        "| rule | symptom | usual cause | what to do |", "|---|---|---|---|", *rows, "",
        "Told once, and no sickness:", "", "| note | when | why |", "|---|---|---|", *notes,
    ]  # fmt: skip
    return with_part(page, "rules", "table_of_rules", "\n".join(table))


def _quoted(text: str) -> str:
    """Returns a text for consoles with its settings in code style."""
    settings = [x.name for x in dataclasses.fields(GRPOConfig) if "_" in x.name or x.name == "beta"]
    longest_first = "|".join(sorted(settings, key=len, reverse=True))
    return re.sub(rf"\b({longest_first})\b", r"`\1`", text)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
