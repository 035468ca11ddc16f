"""`grpo-eqx launch tpu-vm logs`."""

import dataclasses
import os
import sys

from grpo_eqx.launch.processes import Process, run_together, write_lines
from grpo_eqx.launch.subcommand import Subcommand, check_at_least
from grpo_eqx.launch.tpu_vm.pod import Pod, script
from grpo_eqx.launch.tpu_vm.run import LATEST, check_run_name
from grpo_eqx.launch.tpu_vm.vm import TypeFlag, Vm, show


@dataclasses.dataclass(frozen=True, kw_only=True)
class Logs(Subcommand):
    """Print the end of a run's logs, each line prefixed with its worker's number."""

    vm: Vm
    accelerator: TypeFlag
    """Type that the VM was created with."""
    worker: int | None = None
    """Worker to show, from 0; by default all."""
    follow: bool = False
    """Keep printing new lines until the run ends, or Ctrl-C."""
    lines: int = 20
    """Number of lines to print of each log."""
    run_name: str = LATEST
    """Run to show; by default the newest."""

    def run(self, command: tuple[str, ...]) -> int:
        check_run_name(self.run_name)
        check_at_least("lines", self.lines, 0)
        pod = Pod.ready(self.vm, self.accelerator)
        workers = list(range(pod.slice.hosts))
        if self.worker is not None:
            pod.check_worker(self.worker)
            workers = [self.worker]
        if self.follow:
            return self._follow(pod, workers)
        finished = pod.try_all(workers, lambda worker: self._command(pod, worker))
        for worker, done in zip(workers, finished, strict=True):
            *lines, rest = done.output.encode(errors="surrogateescape").split(b"\n")
            write_lines(f"[{worker}] ".encode(), [*lines, rest] if rest else lines, sys.stdout)
        pod.check("show the log", dict(zip(workers, finished, strict=True)))
        return 0

    def _command(self, pod: Pod, worker: int) -> list[str]:
        follow = "yes" if self.follow else "no"
        return pod.ssh_command(worker, script("logs"), self.run_name, str(self.lines), follow)

    def _follow(self, pod: Pod, workers: list[int]) -> int:
        commands = {worker: self._command(pod, worker) for worker in workers}
        if self.vm.dry_run:
            for arguments in commands.values():
                show(arguments)
            return 0
        return run_together(
            [Process(str(worker), each, os.environ) for worker, each in commands.items()]
        ).code
