"""`grpo-eqx launch tpu-vm run`."""

import dataclasses
import datetime
from typing import ClassVar

from grpo_eqx.common.clean_text import print_clean
from grpo_eqx.common.errors import UserError
from grpo_eqx.launch.subcommand import Subcommand, check_name
from grpo_eqx.launch.tpu_vm.pod import Pod, script
from grpo_eqx.launch.tpu_vm.vm import TypeFlag, Vm

LATEST = "latest"
"""Name of the newest run."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run(Subcommand):
    """Start COMMAND on all workers, in the background.

    grpo-eqx launch tpu-vm run --name NAME --zone ZONE --type TYPE [flags] -- COMMAND

    COMMAND runs in the repository's folder, with its Python and the synced environment file, and
    continues after this connection ends. It refuses to train unless all workers take part. A
    second run is refused while one is running.
    """

    takes_command: ClassVar[bool] = True
    vm: Vm
    accelerator: TypeFlag
    """Type that the VM was created with."""
    run_name: str | None = None
    """Name of the run's folder; by default the current time."""
    replace: bool = False
    """End a run that is in progress, and start this one instead."""

    def run(self, command: tuple[str, ...]) -> int:
        name = self.run_name
        if name is None:
            name = f"{datetime.datetime.now(datetime.UTC):%Y%m%d-%H%M%S}"
        check_run_name(name)
        if name == LATEST:
            raise UserError(f"--run-name is {LATEST}, which means the newest run: choose another.")
        pod = Pod.ready(self.vm, self.accelerator)
        # All workers are asked before any starts: half a pod would wait for the other half.
        replace = "yes" if self.replace else "no"
        pod.ssh("prepare for the run", script("end_runs", "prepare_run"), name, replace)
        pod.say(f"starting {name}")
        pod.ssh(
            "start the run",
            script("start_run"),
            script("environment", "supervise"),
            name,
            str(pod.slice.hosts),
            *command,
        )
        if not self.vm.dry_run:
            print_clean(f"started {name} on all {len(pod.addresses)} workers")
        return 0


def check_run_name(name: str) -> None:
    """Raises `UserError` for an invalid name of a run's folder."""
    check_name(
        "run-name",
        name,
        "[A-Za-z0-9][A-Za-z0-9._-]{0,99}",
        "letters, digits, '.', '_' and '-', starting with a letter or a digit",
    )
