"""Launchers that start a command on every host of a pod."""

import dataclasses
from typing import Annotated

import tyro

from grpo_eqx.launch.gke import Gke
from grpo_eqx.launch.local import Local
from grpo_eqx.launch.skypilot import SkyPilot
from grpo_eqx.launch.slurm import Slurm
from grpo_eqx.launch.subcommand import Group
from grpo_eqx.launch.tpu_vm import TpuVm


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch(Group):
    """Start a command on every host: a simulated pod, TPU VMs, Slurm, GKE or SkyPilot."""

    chosen: (
        Annotated[Local, tyro.conf.subcommand("local")]
        | Annotated[TpuVm, tyro.conf.subcommand("tpu-vm")]
        | Annotated[Slurm, tyro.conf.subcommand("slurm")]
        | Annotated[Gke, tyro.conf.subcommand("gke")]
        | Annotated[SkyPilot, tyro.conf.subcommand("skypilot")]
    )
