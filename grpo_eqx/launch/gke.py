"""GKE: a JobSet manifest."""

import dataclasses
from pathlib import Path
from typing import Annotated, ClassVar

import tyro

from grpo_eqx.common.errors import EXIT_DOES_NOT_FIT, EXIT_USER_ERROR
from grpo_eqx.distributed.tpu_slices import find_slice
from grpo_eqx.launch.files import SHARED, render, write
from grpo_eqx.launch.quoting import kubernetes_argument, yaml_text
from grpo_eqx.launch.subcommand import Subcommand, check_at_least, check_name

_LABEL = "[a-z]([-a-z0-9]{0,38}[a-z0-9])?"
_LABEL_RULE = (
    "at most 40 lowercase letters, digits and '-', starting with a letter and not ending with '-'"
)
_OBJECT_NAME = "[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?"
_OBJECT_RULE = "lowercase letters, digits, '-' and '.'"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gke(Subcommand):
    """Print a JobSet manifest for GKE that runs COMMAND on every host of a TPU slice.

    grpo-eqx launch gke --type TYPE --image IMAGE [flags] -- COMMAND

    Start it with kubectl apply. COMMAND runs as it is, without a shell.
    """

    takes_command: ClassVar[bool] = True
    accelerator: Annotated[str, tyro.conf.arg(name="type")]
    """TPU slice, such as v6e-16, v5p-32, v5e-16 (or v5litepod-16) or v4-16."""
    image: str
    """Container image with grpo_eqx, its tpu extra and your script."""
    name: str = "grpo-eqx"
    """Name of the JobSet."""
    secret: str | None = None
    """Kubernetes secret whose keys become environment variables, such as HF_TOKEN. Create it with
    kubectl create secret generic NAME --from-env-file .env."""
    claim: str | None = None
    """PersistentVolumeClaim to mount at /shared, for output_dir: storage that all hosts can read
    and write, such as Filestore (ReadWriteMany)."""
    max_restarts: int = 0
    """Maximum number of times that all pods restart after one fails; a run then continues from its
    last checkpoint."""
    output: Path | None = None
    """File to write, instead of standard output."""

    def run(self, command: tuple[str, ...]) -> int:
        wanted = find_slice(self.accelerator)
        check_name("name", self.name, _LABEL, _LABEL_RULE)
        check_at_least("max-restarts", self.max_restarts, 0)
        arguments = [yaml_text(kubernetes_argument(argument)) for argument in command]
        manifest = render(
            "gke.yaml",
            name=self.name,
            max_restarts=self.max_restarts,
            final_codes=f"{EXIT_USER_ERROR}, {EXIT_DOES_NOT_FIT}",
            hosts=wanted.hosts,
            chips=wanted.chips_per_host,
            accelerator=wanted.gke_accelerator,
            topology=yaml_text(wanted.topology),
            image=yaml_text(self.image),
            command="\n".join(f"                    - {argument}" for argument in arguments),
            secret=self._secret_lines(),
            mounts=self._mount_lines(),
            volumes=self._volume_lines(),
        )
        write(manifest, self.output)
        return 0

    def _secret_lines(self) -> str:
        if self.secret is None:
            return ""
        check_name("secret", self.secret, _OBJECT_NAME, _OBJECT_RULE)
        return (
            "                  envFrom:\n"
            "                    - secretRef:\n"
            f"                        name: {yaml_text(self.secret)}\n"
        )

    def _mount_lines(self) -> str:
        if self.claim is None:
            return ""
        return (
            "                  volumeMounts:\n"
            "                    - name: shared\n"
            f"                      mountPath: {SHARED}\n"
        )

    def _volume_lines(self) -> str:
        if self.claim is None:
            return ""
        check_name("claim", self.claim, _OBJECT_NAME, _OBJECT_RULE)
        return (
            "              volumes: # storage that all hosts share\n"
            "                - name: shared\n"
            "                  persistentVolumeClaim:\n"
            f"                    claimName: {yaml_text(self.claim)}\n"
        )
