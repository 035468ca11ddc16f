"""SkyPilot: a task file."""

import dataclasses
import re
import sys
from pathlib import Path
from typing import Annotated, ClassVar

import tyro

from grpo_eqx.common.clean_text import print_clean
from grpo_eqx.common.errors import EXIT_PREEMPTED, UserError
from grpo_eqx.distributed.tpu_slices import find_slice
from grpo_eqx.launch.files import SHARED, render, write
from grpo_eqx.launch.quoting import shell_line, yaml_text
from grpo_eqx.launch.subcommand import Subcommand, check_at_least, check_name

_TPU_CLUSTER = "  # TPU VMs of one slice learn of each other from Google's metadata server."
_GPU_CLUSTER = """\
  export JAX_COORDINATOR_ADDRESS="$(echo "$SKYPILOT_NODE_IPS" | head -n 1):8476"
  export JAX_NUM_PROCESSES="$SKYPILOT_NUM_NODES" JAX_PROCESS_ID="$SKYPILOT_NODE_RANK\""""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SkyPilot(Subcommand):
    """Print a SkyPilot task that runs COMMAND on every host of a TPU slice or of GPU nodes.

    grpo-eqx launch skypilot --type TYPE [flags] -- COMMAND

    grpo-eqx launch skypilot --gpus H100:8 --nodes N [flags] -- COMMAND

    Start it with sky launch, or as a managed job, which comes back after a preemption, with sky
    jobs launch.
    """

    takes_command: ClassVar[bool] = True
    accelerator: Annotated[str | None, tyro.conf.arg(name="type")] = None
    """TPU slice, such as v6e-16, v5p-32, v5e-16 (or v5litepod-16) or v4-16."""
    gpus: str | None = None
    """GPUs of each node, instead of a slice: SkyPilot's name and a count, such as H100:8."""
    nodes: int = 1
    """Number of nodes with these GPUs. A TPU slice is one node, however many hosts it has."""
    spot: bool = False
    """Request spot machines, which are cheaper but can be preempted at any time."""
    max_restarts: int = 0
    """Maximum number of times that a managed job restarts after an error, whatever its exit code.
    One that was asked to stop always does, and continues from its last checkpoint."""
    secrets: tuple[str, ...] = ()
    """Names of environment variables to pass on, such as HF_TOKEN. Give their values to sky launch,
    with --secret HF_TOKEN."""
    bucket: str | None = None
    """Bucket to mount at /shared on all hosts, for output_dir, such as gs://my-bucket."""
    name: str = "grpo-eqx"
    """Name of the task."""
    output: Path | None = None
    """File to write, instead of standard output."""

    def run(self, command: tuple[str, ...]) -> int:
        if (self.accelerator is None) == (self.gpus is None):
            raise UserError("give either --type, for a TPU slice, or --gpus.")
        check_name(
            "name", self.name, "[a-z]([-a-z0-9]*[a-z0-9])?", "lowercase letters, digits and '-'"
        )
        check_at_least("nodes", self.nodes, 1)
        check_at_least("max-restarts", self.max_restarts, 0)
        if not all(re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", secret) for secret in self.secrets):
            # The message omits the input, which may hold a secret's value.
            raise UserError("--secrets takes only names of variables, such as HF_TOKEN.")
        of_kind = self._tpu() if self.accelerator is not None else self._gpu()
        task = render(
            "skypilot.yaml",
            name=yaml_text(self.name),
            nodes=self.nodes,
            max_restarts=self.max_restarts,
            preempted=EXIT_PREEMPTED,
            secrets=self._secret_lines(),
            mounts=self._mount_lines(),
            start="jobs launch" if self.spot or self.max_restarts else "launch",
            command=shell_line(command),
            **of_kind,
        )
        write(task, self.output)
        if not Path("pyproject.toml").is_file():
            print_clean(
                f"note: this folder has no pyproject.toml. The task installs the folder from which "
                f"it is launched, with its extra {of_kind['extra']}: launch it from a project that "
                f"depends on grpo_eqx, or from a checkout of grpo_eqx.",
                file=sys.stderr,
            )
        return 0

    def _tpu(self) -> dict[str, str | int]:
        assert self.accelerator is not None
        wanted = find_slice(self.accelerator)
        if self.nodes != 1:
            raise UserError(
                f"--nodes is {self.nodes}, but a run has one slice: choose a larger --type."
            )
        return {
            "resources": f"  accelerators: tpu-{wanted.name}\n"
            f"  accelerator_args:\n    runtime_version: {wanted.runtime_version}\n{self._spot()}",
            "extra": "tpu",
            "processes": wanted.hosts,
            "cluster": _TPU_CLUSTER,
        }

    def _gpu(self) -> dict[str, str | int]:
        assert self.gpus is not None
        check_name(
            "gpus", self.gpus, r"[A-Za-z0-9][A-Za-z0-9-]*:\d+", "a name and a count, such as H100:8"
        )
        return {
            "resources": f"  accelerators: {yaml_text(self.gpus)}\n{self._spot()}",
            "extra": "cuda",
            "processes": self.nodes,
            "cluster": _GPU_CLUSTER,
        }

    def _spot(self) -> str:
        return f"  use_spot: {str(self.spot).lower()}"

    def _secret_lines(self) -> str:
        if not self.secrets:
            return ""
        return "secrets:\n" + "".join(f"  {secret}: null\n" for secret in self.secrets)

    def _mount_lines(self) -> str:
        if self.bucket is None:
            return ""
        check_name(
            "bucket", self.bucket, r"[a-z0-9]+://[A-Za-z0-9][-A-Za-z0-9_./]*",
            "an address, such as gs://my-bucket",
        )  # fmt: skip
        return (
            "file_mounts: # storage that all hosts share\n"
            f"  {SHARED}:\n    source: {yaml_text(self.bucket)}\n    mode: MOUNT\n"
        )
