"""The command `grpo-eqx doctor`."""

import dataclasses
from pathlib import Path

from grpo_eqx.launch.subcommand import Subcommand
from grpo_eqx.settings.embedded import EMBEDDED_MODEL

_COLORS = {"ok": "green", "warn": "yellow", "fail": "red"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Doctor(Subcommand):
    """Check whether this machine is ready for a run, and say how to fix what is not.

    grpo-eqx doctor [flags]

    Prints a line per check: packages, devices, caches, the Hugging Face hub, Weights & Biases, the
    output folder and its disk, open files, and the processes of a run, without joining them. Exits
    with 1 if a check failed; warnings do not count.
    """

    model: str = EMBEDDED_MODEL
    """Model whose checkpoints must fit the disk: a folder or hub name."""
    output_dir: Path = Path("runs")
    """Folder that runs are to be written to."""

    def run(self, command: tuple[str, ...]) -> int:
        from rich.text import Text

        from grpo_eqx.cli.machine_checks import run_checks
        from grpo_eqx.tracking.safe_console import safe_console

        console, failed = safe_console(), False
        for name, check in run_checks(self.output_dir, self.model):
            failed = failed or check.status == "fail"
            color = _COLORS[check.status]
            parts = [
                (f"{check.status:4} ", f"bold {color}"),
                (f"{name}: ", "bold"),
                (check.found, ""),
                (f"; fix: {check.fix}" if check.fix else "", color),
            ]
            console.print(Text.assemble(*parts), soft_wrap=True)
        return 1 if failed else 0
