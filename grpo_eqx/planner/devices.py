"""The devices that a plan is for: a described TPU slice, or the local devices."""

import dataclasses
import functools
import importlib.metadata
import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from grpo_eqx.choices import LOCAL
from grpo_eqx.errors import UserError
from grpo_eqx.planner.topologies import described_devices

_LIMIT = re.compile(r"exceeds available HBM \(([^)]+)\)|Used \S+ of (\S+) hbm")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


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
    return Target(topology, devices, _described_bytes(devices[0]), compiler)


def installed_version(package: str) -> str | None:
    """Returns the version of a package; `None` if none of that name is installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def local_target(devices: Sequence[jax.Device]) -> Target:
    """Returns the target of attached devices."""
    return Target(LOCAL, devices, _local_bytes(devices), devices[0].client.platform_version)


@functools.cache
def _described_bytes(device: jax.Device) -> int:
    """Returns the bytes that a program may use, from the compiler's error for a larger one."""
    everywhere = NamedSharding(Mesh(np.array([device]), "all"), PartitionSpec())
    vast = jax.ShapeDtypeStruct((2**40,), jnp.float32, sharding=everywhere)
    try:
        jax.jit(lambda x: x + 1).lower(vast).compile()
    except jax.errors.JaxRuntimeError as error:
        if match := _LIMIT.search(str(error)):
            return parse_size(match[1] or match[2])
        raise
    raise UserError(
        f"the memory of {device.device_kind} is unknown: its compiler does not report it."
    )


def parse_size(text: str) -> int:
    """Parses a number of bytes as the compiler writes it: `31.25G`."""
    return int(float(text[:-1]) * _UNITS[text[-1]]) if text[-1] in _UNITS else int(text)


def _local_bytes(devices: Sequence[jax.Device]) -> int:
    """Returns the usable bytes of the device that has the least."""
    own = [device for device in devices if device.process_index == jax.process_index()]
    if own[0].platform == "cpu":
        return _host_bytes() // max(Counter(d.process_index for d in devices).values())
    stats = [device.memory_stats() for device in own]
    limits = [each["bytes_limit"] for each in stats if each and "bytes_limit" in each]
    if not limits:
        raise UserError(f"the memory of {own[0].device_kind} is unknown: JAX does not report it.")
    return min(limits)


def _host_bytes() -> int:
    """Returns the bytes of this machine's memory, or of the part that this process may use."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        allowed = _CGROUP_LIMIT.read_text().strip()
    except OSError:
        return total
    return total if allowed == "max" else min(total, int(allowed))
