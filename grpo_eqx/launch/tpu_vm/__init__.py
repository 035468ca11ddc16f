"""Google TPU VMs, through the `gcloud` command."""

import dataclasses
from typing import Annotated

import tyro

from grpo_eqx.launch.subcommand import Group
from grpo_eqx.launch.tpu_vm.bootstrap import Bootstrap
from grpo_eqx.launch.tpu_vm.create import Create
from grpo_eqx.launch.tpu_vm.delete import Delete
from grpo_eqx.launch.tpu_vm.fetch import Fetch
from grpo_eqx.launch.tpu_vm.logs import Logs
from grpo_eqx.launch.tpu_vm.run import Run
from grpo_eqx.launch.tpu_vm.status import Status
from grpo_eqx.launch.tpu_vm.stop import Stop
from grpo_eqx.launch.tpu_vm.sync_env import SyncEnv


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuVm(Group):
    """Create, set up, use and delete Google TPU VMs with gcloud.

    Commands act on all workers, unless --worker names one; fetch copies from one. --dry-run prints
    the gcloud commands instead.
    """

    chosen: (
        Annotated[Create, tyro.conf.subcommand("create")]
        | Annotated[Bootstrap, tyro.conf.subcommand("bootstrap")]
        | Annotated[SyncEnv, tyro.conf.subcommand("sync-env")]
        | Annotated[Run, tyro.conf.subcommand("run")]
        | Annotated[Logs, tyro.conf.subcommand("logs")]
        | Annotated[Status, tyro.conf.subcommand("status")]
        | Annotated[Fetch, tyro.conf.subcommand("fetch")]
        | Annotated[Stop, tyro.conf.subcommand("stop")]
        | Annotated[Delete, tyro.conf.subcommand("delete")]
    )
