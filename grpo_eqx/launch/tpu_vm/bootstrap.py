"""`grpo-eqx launch tpu-vm bootstrap`."""

import dataclasses

from grpo_eqx.common.clean_text import print_clean
from grpo_eqx.launch.subcommand import CommandError, Subcommand
from grpo_eqx.launch.tpu_vm.commit import resolve_commit
from grpo_eqx.launch.tpu_vm.pod import Pod, script
from grpo_eqx.launch.tpu_vm.vm import TypeFlag, Vm


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bootstrap(Subcommand):
    """Install a repository at one commit on all workers.

    Each worker gets Python 3.12 in a virtual environment, the repository, and its tpu extra, all
    in ~/grpo-eqx. Run again on the same VM, it switches to the given commit and discards changes
    to tracked files.
    """

    vm: Vm
    accelerator: TypeFlag
    """Type that the VM was created with."""
    repo: str
    """URL to clone. Keep tokens out of it: command lines are visible to others."""
    commit: str
    """Commit, branch or tag, resolved here to the one commit that all workers get. What a
    checkout of the repository knows by that name comes first: it must be pushed, and HEAD must have
    no uncommitted changes. Else the repository is asked for branches and tags."""

    def run(self, command: tuple[str, ...]) -> int:
        commit = resolve_commit(self.repo, self.commit)
        pod = Pod.ready(self.vm, self.accelerator)
        pod.say(f"installing {commit}")
        # gcloud creates an SSH key if there is none; several at once would get in each other's way.
        first = pod.try_all([0], lambda worker: pod.ssh_command(worker, "true"))
        pod.check("answer", {0: first[0]})
        done = pod.ssh(
            "install the repository",
            script("make_folder", "environment", "bootstrap"),
            self.repo,
            commit,
        )
        if self.vm.dry_run:
            return 0
        for worker, finished in enumerate(done):
            found = (finished.output.split() or ["none"])[-1]
            if found != commit:
                raise CommandError(
                    f"{pod.worker_name(worker)} has commit {found} instead of {commit}: run "
                    f"bootstrap again."
                )
        print_clean(f"all {len(done)} workers have commit {commit}")
        return 0
