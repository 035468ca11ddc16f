"""All workers of a TPU VM, each through its own `gcloud`.

With `--worker=all` gcloud mixes their output and keeps only one exit code.
"""

import dataclasses
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import resources

from grpo_eqx.common.clean_text import print_clean
from grpo_eqx.common.errors import UserError
from grpo_eqx.distributed.tpu_slices import Slice, find_slice
from grpo_eqx.launch.subcommand import CommandError
from grpo_eqx.launch.tpu_vm.vm import Finished, Vm, execute, show

_AT_ONCE = 32
"""Maximum number of concurrent gclouds, each of which takes about 100 MB."""


@dataclasses.dataclass(frozen=True)
class Description:
    """State of a VM, as the cloud reports it."""

    state: str
    type: str | None
    addresses: tuple[str, ...]
    """Address of each worker; empty if it has none yet."""


@dataclasses.dataclass(frozen=True)
class Pod:
    """Workers of a VM."""

    vm: Vm
    slice: Slice
    addresses: tuple[str, ...]

    @classmethod
    def ready(cls, vm: Vm, accelerator: str) -> "Pod":
        """Returns the workers; raises `CommandError` if not ready, `UserError` for another type."""
        wanted = find_slice(accelerator)
        if vm.dry_run:
            show(describe_command(vm))
            return cls(vm, wanted, ("",) * wanted.hosts)
        found = describe(vm)
        if found.state != "READY":
            raise CommandError(
                f"{vm.name} is {found.state}, not READY: wait for it, or delete it and create it "
                f"again if it was preempted."
            )
        check_type(vm, wanted, found)
        if len(found.addresses) != wanted.hosts:
            raise CommandError(
                f"{vm.name} has {len(found.addresses)} workers, but a {wanted.name} has "
                f"{wanted.hosts}: delete it and create it again."
            )
        return cls(vm, wanted, found.addresses)

    def ssh_command(self, worker: int, script: str, *arguments: str) -> list[str]:
        """Returns the command that runs a script on a worker. Arguments may contain anything."""
        remote = shlex.join(["bash", "-c", script, "grpo-eqx", *arguments])
        return self.vm.gcloud("ssh", f"--worker={worker}", f"--command={remote}")

    def ssh(self, doing: str, script: str, *arguments: str) -> list[Finished]:
        """Runs a script on all workers; raises a `CommandError` that names those where it fails."""
        return self.on_all(doing, lambda worker: self.ssh_command(worker, script, *arguments))

    def on_all(self, doing: str, command: Callable[[int], list[str]]) -> list[Finished]:
        """Runs a command for each worker, in parallel; raises `CommandError` as `ssh` does."""
        finished = self.try_all(range(len(self.addresses)), command)
        self.check(doing, dict(enumerate(finished)))
        return finished

    def try_all(
        self, workers: Sequence[int], command: Callable[[int], list[str]]
    ) -> list[Finished]:
        """Runs a command for each of these workers, in parallel, whatever their exit codes."""
        commands = [command(worker) for worker in workers]
        if self.vm.dry_run:
            for arguments in commands:
                show(arguments)
            return [Finished(0, "", "")] * len(commands)
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return list(pool.map(execute, commands))

    def check(self, doing: str, finished: dict[int, Finished]) -> None:
        """Raises `CommandError` with all workers whose command failed, and their output."""
        failed = {worker: done for worker, done in finished.items() if done.code}
        if failed:
            names = ", ".join(self.worker_name(worker) for worker in failed)
            details = "".join(
                f"\n  {self.worker_name(worker)}, exit code {done.code}:\n{done.tail()}"
                for worker, done in failed.items()
            )
            counts = f"{len(failed)} of {len(self.addresses)} workers"
            raise CommandError(f"{counts} failed to {doing}: {names}.{details}")

    def check_worker(self, worker: int) -> None:
        """Raises `UserError` unless a worker has this number."""
        if not 0 <= worker < self.slice.hosts:
            raise UserError(f"--worker is {worker}: it must be from 0 to {self.slice.hosts - 1}.")

    def worker_name(self, worker: int) -> str:
        address = self.addresses[worker]
        return f"worker {worker} ({address})" if address else f"worker {worker}"

    def say(self, doing: str) -> None:
        """Tells the waiting user what is being done."""
        if not self.vm.dry_run:
            print_clean(f"{doing} ({len(self.addresses)} workers) ...", file=sys.stderr)


def describe_command(vm: Vm) -> list[str]:
    return vm.gcloud("describe", "--format=json")


def describe(vm: Vm) -> Description:
    """Queries the state of a VM; raises `CommandError` if that fails."""
    done = execute(describe_command(vm))
    if done.code:
        raise CommandError(f"cannot describe {vm.name} in {vm.zone}:\n{done.tail()}")
    node = json.loads(done.output)
    # One endpoint per network of each worker; ssh uses the first.
    endpoints = node.get("networkEndpoints", [])[:: max(1, len(node.get("networkConfigs", [])))]
    return Description(
        state=node.get("state", "in an unknown state"),
        type=node.get("acceleratorType"),
        addresses=tuple(
            end.get("accessConfig", {}).get("externalIp") or end.get("ipAddress", "")
            for end in endpoints
        ),
    )


def check_type(vm: Vm, wanted: Slice, found: Description) -> None:
    """Raises `UserError` if the VM has another type: some of its workers would be left out."""
    if found.type is not None and found.type != wanted.name:
        raise UserError(
            f"--type is {wanted.name}, but {vm.name} is a {found.type}: give that type."
        )


def script(*names: str) -> str:
    """Concatenates scripts of this package."""
    folder = resources.files(__package__).joinpath("scripts")
    return "".join(folder.joinpath(f"{name}.sh").read_text("utf-8") for name in names)
