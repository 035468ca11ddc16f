"""The devices that a plan is for: a described TPU slice, or the local devices."""

import dataclasses
from collections.abc import Sequence

import jax

from grpo_eqx.common.choices import LOCAL
from grpo_eqx.distributed.program_facts import installed_version
from grpo_eqx.planner.topologies import described_devices
from grpo_eqx.sharding.device_memory import usable_bytes


@dataclasses.dataclass(frozen=True)
class Target:
    """Devices to compile for."""

    name: str
    """A TPU type or grid, or `local`."""
    devices: Sequence[jax.Device]
    usable_bytes: int
    """Memory of each device that programs can use, without what the runtime reserves."""
    compiler: str
    """The compiler and its version."""

    @property
    def device_kind(self) -> str:
        return self.devices[0].device_kind

    @property
    def on_tpu(self) -> bool:
        return self.devices[0].platform == "tpu"


def find_target(topology: str) -> Target:
    """Finds a TPU type (v6e-16), a grid (v6e:4x4), or `local`: the devices that JAX sees.

    Raises `UserError` for an unknown one, and without the compiler for TPUs.
    """
    if topology == LOCAL:
        return local_target(jax.devices())
    devices = described_devices(topology)
    compiler = f"libtpu {installed_version('libtpu')}"
    return Target(topology, devices, usable_bytes(devices), compiler)


def local_target(devices: Sequence[jax.Device]) -> Target:
    """Returns the target of attached devices."""
    return Target(LOCAL, devices, usable_bytes(devices), devices[0].client.platform_version)
