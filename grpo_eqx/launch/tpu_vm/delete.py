"""`grpo-eqx launch tpu-vm delete`."""

import dataclasses
from typing import Annotated

import tyro

from grpo_eqx.common.clean_text import print_clean
from grpo_eqx.common.errors import UserError
from grpo_eqx.distributed.tpu_slices import find_slice
from grpo_eqx.launch.subcommand import CommandError, Subcommand
from grpo_eqx.launch.tpu_vm.pod import check_type, describe, describe_command
from grpo_eqx.launch.tpu_vm.vm import Vm, execute, show


@dataclasses.dataclass(frozen=True, kw_only=True)
class Delete(Subcommand):
    """Delete a VM with everything on its disks, after asking."""

    vm: Vm
    accelerator: Annotated[str | None, tyro.conf.arg(name="type")] = None
    """Type that the VM was created with: one of another type is then not deleted."""
    yes: bool = False
    """Skip the confirmation."""

    def run(self, command: tuple[str, ...]) -> int:
        arguments = self.vm.gcloud("delete")
        wanted = None if self.accelerator is None else find_slice(self.accelerator)
        if self.vm.dry_run:
            if wanted is not None:
                show(describe_command(self.vm))
            show(arguments)
            return 0
        if wanted is not None:
            check_type(self.vm, wanted, describe(self.vm))
        if not self.yes and not self._confirmed():
            print_clean(f"{self.vm.name} was not deleted")
            return 1
        done = execute(arguments)
        if done.code:
            raise CommandError(f"{self.vm.name} was not deleted:\n{done.tail()}")
        print_clean(f"deleted {self.vm.name} in {self.vm.zone}")
        return 0

    def _confirmed(self) -> bool:
        try:
            answer = input(f"Delete {self.vm.name} in {self.vm.zone}, with its disks? [y/N] ")
        except EOFError:
            raise UserError("there is no input to confirm with: pass --yes.") from None
        return answer.strip().lower() in ("y", "yes")
