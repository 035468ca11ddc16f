"""A TPU VM by name, and the `gcloud` commands that address it."""

import dataclasses
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import tyro

from grpo_eqx.common.clean_text import print_clean
from grpo_eqx.common.errors import UserError
from grpo_eqx.launch.quoting import shell_line
from grpo_eqx.launch.subcommand import check_name

_TAIL_LINES = 10

TypeFlag = Annotated[str, tyro.conf.arg(name="type")]
"""Type of the flag `--type`, whose own name is a built-in of Python."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Vm:
    """VM to act on."""

    name: str
    """Name of the VM."""
    zone: str
    """Zone of the VM, such as us-east5-b."""
    project: str | None = None
    """Google Cloud project; by default gcloud's own."""
    dry_run: bool = False
    """Print the gcloud commands, quoted for a shell, without executing them."""

    def gcloud(self, action: str, *flags: str) -> list[str]:
        """Returns the command for an action on this VM. Raises `UserError` for invalid names."""
        return self._command(action, [self.name], flags)

    def copy_to(self, worker: int, source: Path, destination: str) -> list[str]:
        """Returns the command that copies a file of this machine to a worker."""
        paths = [str(source), f"{self.name}:{destination}"]
        return self._command("scp", paths, [f"--worker={worker}"])

    def copy_from(self, worker: int, source: str, folder: Path) -> list[str]:
        """Returns the command that copies a file or folder of a worker into a folder here."""
        paths = [f"{self.name}:{source}", str(folder)]
        return self._command("scp", paths, [f"--worker={worker}", "--recurse"])

    def _command(self, action: str, positional: Sequence[str], flags: Sequence[str]) -> list[str]:
        check_name(
            "name",
            self.name,
            "[a-z]([-a-z0-9]{0,61}[a-z0-9])?",
            "at most 63 lowercase letters, digits and '-', "
            "starting with a letter and not ending with '-'",
        )
        check_name(
            "zone", self.zone, r"[a-z]+(-[a-z]+)+\d+-[a-z0-9]+", "a zone, such as us-east5-b"
        )
        address = [*positional, f"--zone={self.zone}"]
        if self.project is not None:
            check_name(
                "project",
                self.project,
                r"([a-z0-9.-]+:)?[a-z][a-z0-9-]{4,28}[a-z0-9]",
                "a project's ID: 6 to 30 lowercase letters, digits and '-'",
            )
            address.append(f"--project={self.project}")
        return ["gcloud", "compute", "tpus", "tpu-vm", action, *address, "--quiet", *flags]


class Finished(NamedTuple):
    """Result of a command."""

    code: int
    output: str
    errors: str

    def tail(self) -> str:
        """Returns the last lines of its output, indented."""
        lines = (self.output + self.errors).splitlines()[-_TAIL_LINES:]
        return "\n".join(f"    {line}" for line in lines)


def show(arguments: Sequence[str]) -> None:
    """Prints the command, quoted for a shell."""
    text = shlex.join(arguments)  # on several lines, as scripts are
    readable = all(line.isprintable() for line in text.split("\n"))
    print_clean(text if readable else shell_line(arguments))


def execute(arguments: Sequence[str]) -> Finished:
    """Runs the command to completion."""
    if shutil.which(arguments[0]) is None:
        raise UserError(
            f"{arguments[0]} is not on PATH: install the Google Cloud CLI "
            f"(https://cloud.google.com/sdk/docs/install) and log in with gcloud auth login."
        )
    done = subprocess.run(
        arguments,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    texts = (each.decode(errors="surrogateescape") for each in (done.stdout, done.stderr))
    return Finished(done.returncode, *texts)
