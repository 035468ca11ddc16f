"""`grpo-eqx launch tpu-vm create`."""

import dataclasses
import re
import shlex
import sys

from grpo_eqx.common.clean_text import print_clean
from grpo_eqx.distributed.tpu_slices import find_slice
from grpo_eqx.launch.subcommand import CommandError, Subcommand, check_name
from grpo_eqx.launch.tpu_vm.vm import Finished, TypeFlag, Vm, execute

_NO_ROOM = re.compile(
    r"capacity|quota|stock.?out|exhausted|enough resources|limit .*(exceeded|reached)", re.I
)
"""Google's error messages for a zone that lacks capacity or quota; another zone may not."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Create(Subcommand):
    """Create a TPU VM in the first of the zones that has room.

    A zone without capacity or quota is skipped. Any other failure ends the search.
    """

    name: str
    """Name of the VM."""
    accelerator: TypeFlag
    """TPU slice, such as v6e-16, v5p-32, v5e-16 (or v5litepod-16) or v4-16."""
    zones: str
    """Zones to try, in this order, separated by commas: us-east5-b,europe-west4-a. Your project
    needs quota in them."""
    spot: bool = False
    """Request a spot VM, which is cheaper but can be preempted at any time. A preempted one cannot
    be started again: delete it, and create it anew."""
    version: str | None = None
    """Runtime version; by default that of the type."""
    project: str | None = None
    """Google Cloud project; by default gcloud's own."""
    dry_run: bool = False
    """Print the gcloud commands, quoted for a shell, without executing them."""

    def run(self, command: tuple[str, ...]) -> int:
        commands = {zone: self._command(zone) for zone in self.zones.split(",")}
        if self.dry_run:
            print_clean(" ||\n".join(shlex.join(command) for command in commands.values()))
            return 0
        refusals = []
        for zone, arguments in commands.items():
            print_clean(f"creating {self.name} in {zone} ...", file=sys.stderr)
            try:
                done = execute(arguments)
            except KeyboardInterrupt:
                print_clean(
                    f"{self.name} may still come up in {zone}: delete it there", file=sys.stderr
                )
                raise
            if done.code == 0:
                hosts = find_slice(self.accelerator).hosts
                print_clean(f"created {self.name} ({self.accelerator}, {hosts} workers) in {zone}")
                return 0
            self._check_room(zone, done)
            refusals.append(f"\n  {zone}:\n{done.tail()}")
        raise CommandError(f"no zone has capacity for {self.name}: try others.{''.join(refusals)}")

    def _command(self, zone: str) -> list[str]:
        wanted = find_slice(self.accelerator)
        version = self.version or wanted.runtime_version
        check_name("version", version, "[a-z0-9][a-z0-9.-]*", "a version, such as v2-alpha-tpuv6e")
        vm = Vm(name=self.name, zone=zone, project=self.project)
        spot = ["--spot"] if self.spot else []
        return vm.gcloud(
            "create", f"--accelerator-type={wanted.name}", f"--version={version}", *spot
        )

    def _check_room(self, zone: str, done: Finished) -> None:
        if not _NO_ROOM.search(done.errors + done.output):
            raise CommandError(f"{self.name} was not created in {zone}:\n{done.tail()}")
        print_clean(f"{zone} has no capacity", file=sys.stderr)
