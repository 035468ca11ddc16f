"""`grpo-eqx launch tpu-vm sync-env`."""

import dataclasses
from pathlib import Path

from grpo_eqx.common.clean_text import print_clean
from grpo_eqx.launch.subcommand import Subcommand
from grpo_eqx.launch.tpu_vm.env_file import check_env_file
from grpo_eqx.launch.tpu_vm.pod import Pod, script
from grpo_eqx.launch.tpu_vm.vm import TypeFlag, Vm


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyncEnv(Subcommand):
    """Copy a file of environment variables, such as HF_TOKEN, to all workers.

    Runs see them. The file is readable by its owner only, here and on the workers, and no value
    ever appears in a command line or in output.
    """

    vm: Vm
    accelerator: TypeFlag
    """Type that the VM was created with."""
    env_file: Path
    """File of NAME=VALUE lines. A value is everything after the =, taken literally, without quotes.
    Only you may be able to read the file (chmod 600)."""

    def run(self, command: tuple[str, ...]) -> int:
        source = check_env_file(self.env_file)
        pod = Pod.ready(self.vm, self.accelerator)
        pod.say("copying the environment file")
        # Into a folder that is private already: nobody else can read the file, even for a moment.
        pod.ssh("create the folder", script("make_folder"))
        pod.on_all(
            "receive the environment file",
            lambda worker: self.vm.copy_to(worker, source, "grpo-eqx/env.new"),
        )
        pod.ssh("install the environment file", script("place_env"))
        if not self.vm.dry_run:
            print_clean(f"all {len(pod.addresses)} workers have the environment file")
        return 0
