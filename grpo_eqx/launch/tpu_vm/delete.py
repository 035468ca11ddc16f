"""`grpo-eqx launch tpu-vm delete`."""

import dataclasses

from grpo_eqx.errors import UserError
from grpo_eqx.launch.subcommand import CommandError, Subcommand
from grpo_eqx.launch.tpu_vm.vm import Vm, execute, show


@dataclasses.dataclass(frozen=True, kw_only=True)
class Delete(Subcommand):
    """Delete a VM with everything on its disks, after asking."""

    vm: Vm
    yes: bool = False
    """Skip the confirmation."""

    def run(self, command: tuple[str, ...]) -> int:
        arguments = self.vm.gcloud("delete")
        if self.vm.dry_run:
            show(arguments)
            return 0
        if not self.yes and not self._confirmed():
            print(f"{self.vm.name} was not deleted")
            return 1
        done = execute(arguments)
        if done.code:
            raise CommandError(f"{self.vm.name} was not deleted:\n{done.tail()}")
        print(f"deleted {self.vm.name} in {self.vm.zone}")
        return 0

    def _confirmed(self) -> bool:
        try:
            answer = input(f"Delete {self.vm.name} in {self.vm.zone}, with its disks? [y/N] ")
        except EOFError:
            raise UserError("there is no input to confirm with: pass --yes.") from None
        return answer.strip().lower() in ("y", "yes")
