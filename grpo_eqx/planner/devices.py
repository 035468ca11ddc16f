"""The devices that a plan is for: a TPU slice that is described, or the local devices."""

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import topologies

from grpo_eqx.common.choices import LOCAL
from grpo_eqx.common.errors import UserError, first_line
from grpo_eqx.distributed.program_facts import installed_version
from grpo_eqx.distributed.tpu_runtime import libtpu_to_compile
from grpo_eqx.distributed.tpu_slices import Slice, find_slice, slice_of_grid
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


_LIBTPU_NAMES = {"v5litepod": "v5e"}
_HOST_GRIDS = {1: (1, 1, 1), 4: (2, 2, 1), 8: (2, 4, 1)}
"""Grid of a host's chips, by their number."""


def described_devices(name: str) -> Sequence[jax.Device]:
    """Returns the devices of a TPU type (v6e-16) or grid (v6e:4x4), for compilation only.

    They have as many hosts as Google's slices do. Raises `UserError` for an unknown type, and
    without libtpu.
    """
    known = described_slice(name)
    # Without these, libtpu asks the machine it runs on for its TPU, and locks it.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    try:
        with libtpu_to_compile():
            return topologies.get_topology_desc(_grid(known), "tpu", **_options(known)).devices
    except (ImportError, RuntimeError) as error:
        raise UserError(
            f"TPU type {known.name} cannot be described ({first_line(error)}): "
            f'install the compiler with pip install "grpo_eqx[plan]".'
        ) from error


def described_slice(name: str) -> Slice:
    """Returns the slice of a TPU type or grid; raises `UserError` for an unknown one."""
    try:
        return slice_of_grid(name) or find_slice(name)
    except UserError as error:
        raise UserError(
            f"{error} Plans are for a TPU type, such as v6e-8, a grid, such as v6e:4x4, or local, "
            f"the devices of this machine (the only way to plan for GPUs)."
        ) from error


def _grid(known: Slice) -> str:
    generation = known.name.partition("-")[0]
    return f"{_LIBTPU_NAMES.get(generation, generation)}:{known.topology}"


def _options(known: Slice) -> dict[str, Any]:
    options: dict[str, Any] = {"chips_per_host_bounds": _HOST_GRIDS[known.chips_per_host]}
    if known.name.startswith("v4"):
        options["chip_config_name"] = "megacore"  # its two cores are one device, as at run time
    return options
