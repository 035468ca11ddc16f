"""Slurm: a batch script."""

import dataclasses
from pathlib import Path
from typing import ClassVar

from grpo_eqx.cli.subcommand import Subcommand
from grpo_eqx.launch.checks import check_at_least, check_name
from grpo_eqx.launch.files import render, write
from grpo_eqx.launch.quoting import shell_line

_WORD = r"[A-Za-z0-9_][A-Za-z0-9_.,-]*"
_WORD_RULE = "letters, digits, '_', '.', ',' and '-', and not start with '-'"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slurm(Subcommand):
    """Print a Slurm batch script that runs COMMAND, one process on each node.

    grpo-eqx launch slurm --nodes N [flags] -- COMMAND

    The job ends when one process fails. Submit the script with sbatch.
    """

    takes_command: ClassVar[bool] = True
    nodes: int
    """Nodes, with one process on each, which drives all accelerators of its node."""
    name: str = "grpo-eqx"
    """The job's name."""
    gpus_per_node: int | None = None
    """GPUs of each node; none are asked for without it."""
    time: str | None = None
    """The time limit, such as 12:00:00 or 1-00:00:00; the partition's own without it."""
    partition: str | None = None
    """The partition; the cluster's default without it."""
    account: str | None = None
    """The account to charge; your default without it."""
    output: Path | None = None
    """The file to write, instead of standard output."""

    def run(self, command: tuple[str, ...]) -> int:
        check_at_least("nodes", self.nodes, 1)
        check_name("name", self.name, _WORD, _WORD_RULE)
        script = render(
            "slurm.sh",
            name=self.name,
            nodes=self.nodes,
            options="".join(f"#SBATCH {option}\n" for option in self._options()),
            command=shell_line(command),
        )
        write(script, self.output)
        return 0

    def _options(self) -> list[str]:
        options = []
        if self.gpus_per_node is not None:
            check_at_least("gpus-per-node", self.gpus_per_node, 1)
            options.append(f"--gpus-per-node={self.gpus_per_node}")
        if self.time is not None:
            check_name("time", self.time, r"\d[\d:-]*", "minutes, or [DAYS-]HOURS:MINUTES:SECONDS")
            options.append(f"--time={self.time}")
        for flag, value in (("partition", self.partition), ("account", self.account)):
            if value is not None:
                check_name(flag, value, _WORD, _WORD_RULE)
                options.append(f"--{flag}={value}")
        return options
