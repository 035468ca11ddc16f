"""What a benchmark says of the devices that it ran on."""

import platform
from collections.abc import Sequence
from typing import Any

import jax

from grpo_eqx.distributed.exchange import gather_bytes

SHARED_CORES = (
    "These devices share the cores of one machine: times show what dividing the work costs, and "
    "nothing of how it would scale."
)


def device_facts() -> dict[str, Any]:
    """Number and kind of the devices of all processes, all of which must ask."""
    machines = set(gather_bytes(platform.node().encode()))
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "devices": jax.device_count(),
        "hosts": jax.process_count(),
        "shares_cores": device.platform == "cpu" and jax.device_count() > len(machines),
    }


def largest_memory_stat(name: str, devices: Sequence[jax.Device]) -> int | None:
    """Of the devices that this process sees; `None` where the backend does not say, as on CPUs."""
    stats = [device.memory_stats() or {} for device in devices]
    return max((each[name] for each in stats if name in each), default=None)
