"""Writes the documentation's page of metrics from the registry.

python scripts/metrics_page.py
"""

from pathlib import Path

from grpo_eqx.tracking.metric_registry import SECTIONS, Metric

PAGE = Path(__file__).parents[1] / "docs" / "guides" / "metrics.md"
INTRODUCTION = """\
# Metrics

<!-- Made by scripts/metrics_page.py from grpo_eqx/tracking/metric_registry.py: change it there. -->

Every step, and every evaluation, is a line of `metrics.jsonl` in the run's folder, and goes to all
[trackers](tracking.md) under the same names. This page lists them all. Names are TRL's where it has
the metric; a part in braces stands for any name. Shares are between 0 and 1. A run has those
metrics only that its settings give a meaning. With several updates per rollout, metrics of updates
are means over them, or extremes where the name says so.
"""
NOTES = {
    "Rewards": """\
The length penalty of `overlong_buffer` is one more reward function, `soft_overlong`. What an
environment rewards by itself has the name of its class.
""",
    "Time and throughput": """\
A **valid token** is a token of a completion that the step's loss counts. Prompts, padding and
groups that `dynamic_sampling` replaced are not counted, nor are truncated completions with
`mask_truncated_completions`, or completions that `reward_failures` `drop` left out. Each token
counts once, however many passes `num_iterations` makes. Counts cover all devices and hosts
together. How times are divided is explained in [Performance](performance.md).
""",
    "Memory": """\
On several hosts, these are the largest figures of any; "in use" is then measured before the next
rollout begins, and on one host while it runs.
""",
}
"""What a section's table does not say, by its title."""


def page() -> str:
    """Returns the page, in Markdown."""
    parts = [INTRODUCTION]
    for title, metrics in SECTIONS.items():
        parts.append(f"## {title}\n")
        if title in NOTES:
            parts.append(NOTES[title])
        rows = ["| name | unit | meaning | in a healthy run |", "|---|---|---|---|"]
        parts.append("\n".join([*rows, *map(row, metrics)]) + "\n")
    return "\n".join(parts)


def row(metric: Metric) -> str:
    """Returns a metric's row of a table."""
    cells = f"`{metric.name}`", metric.unit, metric.meaning, metric.healthy
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
