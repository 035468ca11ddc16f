"""Writes the table of sicknesses into their page: `python scripts/table_of_rules.py`."""

from pathlib import Path

from grpo_eqx.tracking.diagnosis import RULES

PAGE = Path(__file__).parents[1] / "docs" / "guides" / "sick_runs.md"
BEGIN, END = (
    "<!-- rules: scripts/table_of_rules.py writes what follows -->",
    "<!-- end of rules -->",
)


def with_table(page: str) -> str:
    """Returns the page with the table of all rules between its two marks."""
    head, _, rest = page.partition(BEGIN)
    tail = rest.partition(END)[2]
    rows = [
        f"| `{rule.name}` | {rule.symptom} | {rule.cause} | {rule.advice} |"
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
    return f"{head}{BEGIN}\n\n" + "\n".join(table) + f"\n\n{END}{tail}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
