"""Memory that programs can use on a device, attached or described."""

import functools
import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from grpo_eqx.common.errors import UserError

_LIMIT = re.compile(r"exceeds available HBM \(([^)]+)\)|Used \S+ of (\S+) hbm")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def usable_bytes(devices: Sequence[jax.Device]) -> int:
    """Returns the bytes that programs can use on each device, without the runtime's own memory.

    For attached devices, returns the bytes of this process's smallest device. Raises `UserError` if
    the memory is unknown.
    """
    if devices[0] in jax.devices():
        return _attached_bytes(devices)
    return _described_bytes(devices[0])


@functools.cache
def _described_bytes(device: jax.Device) -> int:
    """Returns the bytes that a program may use, read from the compiler's error for a larger one."""
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
    """Parses a number of bytes as the compiler writes it, such as `31.25G`."""
    return int(float(text[:-1]) * _UNITS[text[-1]]) if text[-1] in _UNITS else int(text)


def _attached_bytes(devices: Sequence[jax.Device]) -> int:
    """Returns the usable bytes of this process's smallest device, of others where it has none."""
    own = [device for device in devices if device.process_index == jax.process_index()]
    own = own or jax.local_devices()
    if own[0].platform == "cpu":
        return _host_bytes() // max(Counter(d.process_index for d in devices).values())
    stats = [device.memory_stats() for device in own]
    limits = [each["bytes_limit"] for each in stats if each and "bytes_limit" in each]
    if not limits:
        raise UserError(f"the memory of {own[0].device_kind} is unknown: JAX does not report it.")
    return min(limits)


def _host_bytes() -> int:
    """Returns the bytes of this machine's memory that this process may use."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        allowed = _CGROUP_LIMIT.read_text().strip()
    except OSError:
        return total
    return total if allowed == "max" else min(total, int(allowed))
