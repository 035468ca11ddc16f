"""`grpo-eqx launch tpu-vm sync-env`."""

import dataclasses
import re
import stat
from pathlib import Path

from grpo_eqx.common.clean_text import print_clean
from grpo_eqx.common.errors import UserError
from grpo_eqx.common.read_files import read_text, reading
from grpo_eqx.launch.subcommand import Subcommand
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


def check_env_file(path: Path) -> Path:
    """Checks an environment file, and returns its absolute path.

    Raises `UserError` if others can read it, or if it would be read differently than meant. No
    message contains a value.
    """
    text = read_text(path, f"--env-file {path}")
    with reading(f"--env-file {path}"):
        mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise UserError(f"{path} holds secrets and can be read by others: chmod 600 it.")
    if ":" in str(path.absolute()):
        raise UserError(
            f"{path} has a ':' in its path, which gcloud would take for a host: move it."
        )
    # Not splitlines: a value may contain a character that only Python treats as a line break.
    for number, line in enumerate(text.split("\n"), start=1):
        if line and not line.startswith("#") and (wrong := _wrong(line)):
            raise UserError(f"line {number} of {path} {wrong}")
    return path.absolute()


def _wrong(line: str) -> str:
    """Returns what is wrong with a line; empty if nothing is."""
    match = re.fullmatch("([A-Za-z_][A-Za-z0-9_]*)=(.*)", line, re.DOTALL)
    if match is None:
        return "is not NAME=VALUE: write it that way, without export or leading spaces."
    value = match[2]
    if "\0" in value or value != value.strip():
        return f"has whitespace around the value of {match[1]}, or a null byte: remove it."
    if value[:1] in ("'", '"'):
        return f"has quotes around the value of {match[1]}, which would be part of it: remove them."
    return ""
