"""The command `grpo-eqx check`."""

import dataclasses
import sys
from pathlib import Path
from typing import Annotated

import tyro

from grpo_eqx.common.clean_text import print_clean
from grpo_eqx.launch.subcommand import Subcommand


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check(Subcommand):
    """Say what is wrong with a run, and what to do.

    grpo-eqx check RUN

    Reads the metrics in the folder of a run that goes on, has ended, or was copied from another
    machine. Exits with 1 if the run is sick, and with 0 if it is healthy; notes do not count.
    """

    run_folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Folder of the run: its output_dir."""

    def run(self, command: tuple[str, ...]) -> int:
        from grpo_eqx.cli.findings import show_findings
        from grpo_eqx.tracking.diagnosis import diagnose
        from grpo_eqx.tracking.recorded_run import RecordedRun

        run = RecordedRun.read(self.run_folder)
        if run.gaps is not None:
            print_clean(f"warning: {run.gaps}", file=sys.stderr)
        findings = diagnose(run.settings, run.steps, run.evaluations, num_devices=run.num_devices)
        show_findings(run, findings)
        return 1 if any(finding.kind == "sickness" for finding in findings) else 0
