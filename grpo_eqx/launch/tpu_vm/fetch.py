"""`grpo-eqx launch tpu-vm fetch`."""

import dataclasses
import sys
from pathlib import Path, PurePosixPath

from grpo_eqx.common.clean_text import print_clean
from grpo_eqx.common.errors import UserError
from grpo_eqx.common.read_files import expanded
from grpo_eqx.launch.subcommand import Subcommand
from grpo_eqx.launch.tpu_vm.pod import Pod
from grpo_eqx.launch.tpu_vm.vm import TypeFlag, Vm, show

_WORKING_FOLDER = "grpo-eqx/repo"
"""Folder that commands of runs start in, from the home folder."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fetch(Subcommand):
    """Copy a file or folder from a worker, such as the folder of a run, to this machine.

    grpo-eqx launch tpu-vm fetch --name NAME --zone ZONE --type TYPE --path PATH [--to FOLDER]
    """

    vm: Vm
    accelerator: TypeFlag
    """Type that the VM was created with."""
    path: str
    """File or folder on the worker. A relative one is in the repository's folder, where runs
    start."""
    to: Path = Path()
    """Folder of this machine to copy it into, created if it is missing; by default the current
    one."""
    worker: int = 0
    """Worker to copy from, from 0. On storage that all share, any has it."""

    def run(self, command: tuple[str, ...]) -> int:
        if not self.path or ":" in self.path or self.path.startswith("~"):
            raise UserError(
                f"--path is {self.path!r}: give an absolute path, or one from the repository's "
                f"folder, without a colon."
            )
        folder = expanded(self.to).absolute()
        if folder.exists() and not folder.is_dir():
            raise UserError(f"--to is {str(self.to)!r}, which is a file: give a folder.")
        pod = Pod.ready(self.vm, self.accelerator)
        pod.check_worker(self.worker)
        source = str(PurePosixPath(_WORKING_FOLDER, self.path))  # an absolute path stays one
        if self.vm.dry_run:
            show(["mkdir", "-p", str(folder)])
        else:
            folder.mkdir(parents=True, exist_ok=True)
            print_clean(f"copying {self.path} from worker {self.worker} ...", file=sys.stderr)
        (done,) = pod.try_all(
            [self.worker], lambda worker: self.vm.copy_from(worker, source, folder)
        )
        pod.check(f"copy {self.path}", {self.worker: done})
        if not self.vm.dry_run:
            print_clean(f"copied {self.path} of worker {self.worker} into {folder}")
        return 0
