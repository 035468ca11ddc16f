"""`grpo-eqx launch tpu-vm stop`."""

import dataclasses

from grpo_eqx.common.clean_text import print_clean
from grpo_eqx.launch.subcommand import Subcommand
from grpo_eqx.launch.tpu_vm.pod import Pod, script
from grpo_eqx.launch.tpu_vm.vm import TypeFlag, Vm


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stop(Subcommand):
    """End the run that is in progress, on all workers.

    grpo-eqx launch tpu-vm stop --name NAME --zone ZONE --type TYPE

    The run gets SIGTERM. It ends, with a checkpoint if step and checkpoint take at most
    preemption_deadline (25 s by default). What is left of it after two minutes is killed. The VM
    stays.
    """

    vm: Vm
    accelerator: TypeFlag
    """Type that the VM was created with."""

    def run(self, command: tuple[str, ...]) -> int:
        pod = Pod.ready(self.vm, self.accelerator)
        pod.say("stopping the run")
        ended = pod.ssh("stop the run", script("end_runs", "stop_run"))
        for worker, done in enumerate(ended):
            if not self.vm.dry_run:
                print_clean(f"{pod.worker_name(worker)}: {done.output.strip()}")
        return 0
