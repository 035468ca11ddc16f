"""Report on runs: one file of HTML, and every plot as a picture."""

from grpo_eqx.tracking.report.write_report import write_report as write_report
