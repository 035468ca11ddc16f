"""Report on a run's device layout, in numbers and in words."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax

from grpo_eqx.sharding.rollout_layout import RolloutLayout

_SPLIT_OVER = {
    "dp": "the batch is split; parameters and optimizer state are replicated",
    "fsdp": "the batch, parameters and optimizer state are split",
    "tp": "attention heads, MLP and vocabulary are split where they divide evenly",
}


@dataclasses.dataclass(frozen=True)
class LayoutReport:
    """Hosts, devices and mesh axes of a run, and the bytes resident on each device."""

    hosts: int
    devices: int
    device_kind: str
    axes: dict[str, int]
    """Sizes of `dp`, `fsdp` and `tp`."""
    rollout_sharding: str
    """Name of the strategy, and the reason for it."""
    parameter_bytes: int
    """Bytes of the parameters on each device."""
    optimizer_bytes: int
    reference_bytes: int
    """Bytes of the reference model on each device; 0 without one."""
    rollout_devices: int = 0
    """Devices that sample, besides those that train; 0 where the same do both."""

    @classmethod
    def of(
        cls,
        mesh: jax.sharding.Mesh,
        rollout: RolloutLayout,
        parameters: Any,
        optimizer_state: Any,
        reference: Any,
    ) -> "LayoutReport":
        """Counts the bytes that each device holds.

        **Arguments:**

        - `mesh`, `rollout`: the mesh, and the layout of a rollout.
        - `parameters`, `optimizer_state`, `reference`: the resident trees of arrays.
        """
        devices: Sequence[jax.Device] = mesh.devices.reshape(-1).tolist()
        return cls(
            hosts=len({device.process_index for device in devices}),
            devices=len(devices),
            device_kind=devices[0].device_kind,
            axes=dict(mesh.shape),
            rollout_sharding=rollout.why,
            parameter_bytes=bytes_per_device(parameters),
            optimizer_bytes=bytes_per_device(optimizer_state),
            reference_bytes=bytes_per_device(reference),
            rollout_devices=0
            if set(rollout.mesh.devices.flat) == set(devices)
            else rollout.mesh.size,
        )

    def __str__(self) -> str:
        lines = [
            f"{self.devices} x {self.device_kind} on {_counted(self.hosts, 'host')}; per device: "
            f"{readable_bytes(self.parameter_bytes)} of parameters, "
            f"{readable_bytes(self.optimizer_bytes)} of optimizer state"
        ]
        if self.reference_bytes:
            lines[0] += f", {readable_bytes(self.reference_bytes)} of reference model"
        lines += [f"  {name}={n}: {_SPLIT_OVER[name]}" for name, n in self.axes.items() if n > 1]
        if self.rollout_devices:
            lines.append(f"  {_counted(self.rollout_devices, 'other device')} sample")
        if max(self.devices, self.rollout_devices) > 1:
            lines.append(f"  rollout sharding {self.rollout_sharding}")
        return "\n".join(lines)


def bytes_per_device(tree: Any) -> int:
    """Returns the bytes of a tree's arrays (or shapes with shardings) on each device."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def readable_bytes(num_bytes: int) -> str:
    """Formats a size in GiB, or in MiB if it is below one GiB."""
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:.2f} GiB"
    return f"{num_bytes / 2**20:.2f} MiB"
