"""The command `grpo-eqx report`."""

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from grpo_eqx.common.clean_text import print_clean
from grpo_eqx.common.errors import UserError
from grpo_eqx.common.read_files import expanded
from grpo_eqx.launch.subcommand import Subcommand


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report(Subcommand):
    """Write a report on runs: one file of HTML, to be read in a browser and sent to others.

    grpo-eqx report RUN [RUN ...] --output report.html

    The file needs no network and nothing beside it. It has settings, findings, learning curves,
    times, memory and completions. Several runs are drawn in the same plots; those that differ in
    their seed only are one line, with a band. A folder beside it has each plot as PNG. A run need
    not have ended.
    """

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN ...]")]
    """Folders of runs."""
    output: Path = Path("report.html")
    """File to write; one that exists is replaced. The pictures are in NAME_plots beside it."""

    def run(self, command: tuple[str, ...]) -> int:
        if not self.runs:
            raise UserError("RUN is missing: name the folder of a run, or of several.")
        from grpo_eqx.tracking.report import write_report

        page, *pictures = write_report(self.runs, expanded(self.output))
        size = page.stat().st_size / 1e6
        print_clean(f"wrote {page} ({size:.2f} MB), and {len(pictures)} plots to {page.stem}_plots")
        return 0
