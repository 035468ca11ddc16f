"""Slurm: a batch script."""

import dataclasses
from pathlib import Path
from typing import ClassVar

from grpo_eqx.common.errors import EXIT_PREEMPTED
from grpo_eqx.launch.files import render, write
from grpo_eqx.launch.quoting import shell_line
from grpo_eqx.launch.subcommand import Subcommand, check_at_least, check_name

_MOST_REQUEUES = 100
_REQUEUE = f"""\
# A run that is asked to stop saves its step; its exit code, or that of a task which ended with it.
case $code in
    {EXIT_PREEMPTED} | 137 | 143)
        # Not forever: a host without enough memory is killed each time.
        ((${{SLURM_RESTART_COUNT:-0}} >= {_MOST_REQUEUES})) || scontrol requeue "$SLURM_JOB_ID"
        ;;
esac
exit $code"""
_WORD = r"[A-Za-z0-9_][A-Za-z0-9_.,-]*"
_WORD_RULE = "letters, digits, '_', '.', ',' and '-', not starting with '-'"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slurm(Subcommand):
    """Print a Slurm batch script that runs COMMAND, one process on each node.

    grpo-eqx launch slurm --nodes N [flags] -- COMMAND

    The job ends when one process fails. Submit the script with sbatch.
    """

    takes_command: ClassVar[bool] = True
    nodes: int
    """Number of nodes; one process on each drives all of its accelerators."""
    name: str = "grpo-eqx"
    """Name of the job."""
    gpus_per_node: int | None = None
    """GPUs per node; none are requested by default."""
    time: str | None = None
    """Time limit, such as 12:00:00 or 1-00:00:00; by default that of the partition."""
    partition: str | None = None
    """Partition; by default the cluster's default."""
    account: str | None = None
    """Account to charge; by default your own default."""
    requeue: bool = False
    """Queue the job again when it is preempted, loses a node or reaches its time limit: it then
    continues from its last checkpoint."""
    output: Path | None = None
    """File to write, instead of standard output."""

    def run(self, command: tuple[str, ...]) -> int:
        check_at_least("nodes", self.nodes, 1)
        check_name("name", self.name, _WORD, _WORD_RULE)
        script = render(
            "slurm.sh",
            name=self.name,
            nodes=self.nodes,
            options="".join(f"#SBATCH {option}\n" for option in self._options()),
            after=_REQUEUE if self.requeue else "exit $code",
            command=shell_line(command),
        )
        write(script, self.output)
        return 0

    def _options(self) -> list[str]:
        options = ["--requeue", "--open-mode=append"] if self.requeue else ["--no-requeue"]
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
