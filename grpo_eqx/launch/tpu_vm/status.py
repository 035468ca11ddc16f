"""`grpo-eqx launch tpu-vm status`."""

import dataclasses

from grpo_eqx.common.clean_text import print_clean
from grpo_eqx.distributed.tpu_slices import find_slice
from grpo_eqx.launch.subcommand import Subcommand
from grpo_eqx.launch.tpu_vm.pod import (
    Pod,
    check_type,
    describe,
    describe_command,
    script,
)
from grpo_eqx.launch.tpu_vm.run import LATEST, check_run_name
from grpo_eqx.launch.tpu_vm.vm import TypeFlag, Vm, show


@dataclasses.dataclass(frozen=True, kw_only=True)
class Status(Subcommand):
    """Show the state of a VM, and of a run on each of its workers.

    The exit code is 1 if the VM is not ready or a worker cannot be reached.
    """

    vm: Vm
    accelerator: TypeFlag
    """Type that the VM was created with."""
    run_name: str = LATEST
    """Run to show; by default the newest."""

    def run(self, command: tuple[str, ...]) -> int:
        check_run_name(self.run_name)
        wanted = find_slice(self.accelerator)
        if self.vm.dry_run:
            show(describe_command(self.vm))
            self._ask(Pod(self.vm, wanted, ("",) * wanted.hosts))
            return 0
        found = describe(self.vm)
        print_clean(f"{self.vm.name}, {found.type or wanted.name} in {self.vm.zone}: {found.state}")
        if found.state != "READY":
            return 1
        check_type(self.vm, wanted, found)
        missing = wanted.hosts - len(found.addresses)
        return self._ask(Pod(self.vm, wanted, found.addresses + ("",) * missing))

    def _ask(self, pod: Pod) -> int:
        workers = range(len(pod.addresses))
        finished = pod.try_all(
            workers, lambda worker: pod.ssh_command(worker, script("status"), self.run_name)
        )
        if self.vm.dry_run:
            return 0
        for worker, done in enumerate(finished):
            said = done.output.strip()
            if done.code:
                said = f"unreachable, exit code {done.code}\n{done.tail()}"
            print_clean(f"{pod.worker_name(worker)}: {said}")
        return int(any(done.code for done in finished))
