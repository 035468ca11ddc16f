"""Device layouts: strategies that build a `jax.sharding.Mesh` of (dp, fsdp, tp)."""

import abc
import math
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol, runtime_checkable

import equinox as eqx
import jax
import numpy as np
from jax.experimental import mesh_utils

from grpo_eqx.common.errors import UserError

AXES = ("dp", "fsdp", "tp")


@runtime_checkable
class Device(Protocol):
    """The part of `jax.Device` that a mesh strategy reads."""

    id: int
    process_index: int


class Mesh(eqx.Module):
    """Strategy that arranges the available devices in a mesh of axes `dp`, `fsdp` and `tp`.

    `dp` holds whole copies of the parameters, `fsdp` splits parameters and batch, `tp` splits
    heads, MLP and vocabulary.
    """

    @abc.abstractmethod
    def shape(self, devices: Sequence[Device]) -> tuple[int, int, int]:
        """Returns the sizes of (dp, fsdp, tp) for devices; raises `UserError` if none fit."""

    def build(self, devices: Sequence[jax.Device] | None = None) -> jax.sharding.Mesh:
        """Builds the mesh over `devices`, by default over all devices that JAX sees.

        On a TPU, neighbors along a mesh axis are neighbors in the interconnect, unless each part of
        `dp` is one host. Otherwise, devices are ordered by process and id. Raises `UserError` if
        `shape` does not return three numbers whose product is the number of devices.
        """
        devices = jax.devices() if devices is None else devices
        shape = self.shape(devices)
        types = [type(size) for size in shape]
        if types != [int] * len(AXES) or math.prod(shape) != len(devices):
            raise UserError(
                f"{type(self).__name__}.shape returned {shape} for {len(devices)} devices: return "
                f"three whole numbers, the sizes of {', '.join(AXES)}, whose product is the number "
                f"of devices."
            )
        return _mesh_of(_grid(shape, devices))


def _grid(shape: tuple[int, int, int], devices: Sequence[jax.Device]) -> np.ndarray:
    ordered = sorted(devices, key=lambda device: (device.process_index, device.id))
    num_hosts = len({device.process_index for device in devices})
    # With a host per part of dp, the order by process keeps the other axes within hosts.
    if devices[0].platform == "tpu" and len(devices) > 1 and not 1 < shape[0] == num_hosts:
        with suppress(AssertionError, NotImplementedError, ValueError):  # not a whole grid
            return mesh_utils.create_device_mesh(shape, ordered, allow_split_physical_axes=True)
    return np.array(ordered, dtype=object).reshape(shape)


class ExplicitMesh(Mesh):
    """Mesh of fixed axis sizes; at most one may be -1, which takes the remaining devices."""

    dp: int = 1
    fsdp: int = 1
    tp: int = 1

    def __check_init__(self) -> None:
        sizes = (self.dp, self.fsdp, self.tp)
        if any(size == 0 or size < -1 for size in sizes) or sizes.count(-1) > 1:
            raise UserError(
                f"mesh {self}: axis sizes must be positive, except that one may be -1 (all "
                f"remaining devices)."
            )

    def __str__(self) -> str:
        return f"{self.dp},{self.fsdp},{self.tp}"

    def shape(self, devices: Sequence[Device]) -> tuple[int, int, int]:
        sizes = [self.dp, self.fsdp, self.tp]
        fixed = int(np.prod([size for size in sizes if size != -1]))
        if -1 in sizes and len(devices) % fixed == 0:
            sizes[sizes.index(-1)] = len(devices) // fixed
        if int(np.prod(sizes)) != len(devices):
            needed = f"a multiple of {fixed}" if -1 in sizes else str(fixed)
            raise UserError(
                f"mesh {self} (dp,fsdp,tp) needs {needed} devices, but {len(devices)} "
                f"{'is' if len(devices) == 1 else 'are'} available: use mesh auto, or axis sizes "
                f"whose product is {len(devices)}."
            )
        return sizes[0], sizes[1], sizes[2]


class AutoMesh(Mesh):
    """Mesh with every device on `fsdp`: `1,-1,1`."""

    def shape(self, devices: Sequence[Device]) -> tuple[int, int, int]:
        return 1, len(devices), 1


class HostLocalMesh(Mesh):
    """Mesh with `fsdp` within each host and `dp` across hosts; on one host, an `AutoMesh`."""

    def shape(self, devices: Sequence[Device]) -> tuple[int, int, int]:
        per_host = Counter(device.process_index for device in devices)
        if len(set(per_host.values())) > 1:
            raise UserError(
                f"mesh host_local needs the same number of devices on every host, but they have "
                f"{dict(sorted(per_host.items()))}: use mesh auto."
            )
        return len(per_host), len(devices) // len(per_host), 1


def parse_mesh(text: str) -> Mesh:
    """Parses a mesh option: `auto`, `host_local`, `1,-1,1` or `dp:2,fsdp:-1,tp:1`.

    Raises `UserError` for anything else.
    """
    named: dict[str, type[Mesh]] = {"auto": AutoMesh, "host_local": HostLocalMesh}
    if text in named:
        return named[text]()
    parts = [part.strip().rpartition(":") for part in text.split(",")]
    names = [name for name, _, _ in parts]
    try:
        sizes = [int(size) for _, _, size in parts]
    except ValueError:
        sizes = []
    if names == ["", "", ""] and len(sizes) == 3:
        return ExplicitMesh(*sizes)
    if sizes and set(names) <= set(AXES) and len(set(names)) == len(names):
        return ExplicitMesh(**dict(zip(names, sizes, strict=True)))
    raise UserError(
        f"mesh {text!r} cannot be parsed: use auto, host_local, three sizes (1,-1,1) or named "
        f"sizes (dp:2,fsdp:-1,tp:1)."
    )


def split_devices(
    devices: Sequence[jax.Device], num_rollout_devices: int
) -> tuple[list[jax.Device], list[jax.Device]]:
    """Returns the devices that train and those that sample, which are the last ones.

    Raises `UserError` where none would train, where they would share a host although there are
    several, or where JAX cannot send weights from the one to the other.
    """
    ordered = sorted(devices, key=lambda device: (device.process_index, device.id))
    number, hosts = num_rollout_devices, {device.process_index for device in ordered}
    if number >= len(ordered):
        raise UserError(
            f"rollout_devices is {number}, and {len(ordered)} "
            f"{'is' if len(ordered) == 1 else 'are'} available, of which at least one must train: "
            f"{'leave it unset' if len(ordered) == 1 else 'lower it'}, or use more devices."
        )
    training, rollout = ordered[:-number], ordered[-number:]
    if len(hosts) > 1 and len(hosts) % 2:
        raise UserError(
            f"rollout_devices is {number}, and {len(hosts)} hosts cannot be split into halves: use "
            f"an even number of hosts."
        )
    # JAX sends arrays between hosts from each device to one other.
    if len(hosts) > 1 and 2 * number != len(ordered):
        raise UserError(
            f"rollout_devices is {number}, and {len(ordered)} devices of {len(hosts)} hosts are "
            f"available: on several hosts, half of the devices sample, which are "
            f"{len(ordered) // 2}."
        )
    return training, rollout


def rollout_mesh(
    training: Sequence[jax.Device], rollout: Sequence[jax.Device]
) -> jax.sharding.Mesh:
    """Builds the mesh of the devices that sample, which hold the weights split over `fsdp`.

    It has as many parts as both can hold, so that each device that samples gets its part from one
    that trains.
    """
    parts = math.gcd(len(training), len(rollout))
    return _mesh_of(_grid((len(rollout) // parts, parts, 1), rollout))


def opposite(training: jax.sharding.Mesh, rollout: jax.sharding.Mesh) -> jax.sharding.Mesh:
    """Returns a second mesh of the devices that train, with the parts of the `rollout_mesh`."""
    return _mesh_of(training.devices.reshape(-1, rollout.shape["fsdp"], 1))


def _mesh_of(grid: np.ndarray) -> jax.sharding.Mesh:
    # Automatic axes: the compiler places collectives. jax.make_mesh would make explicit axes.
    return jax.sharding.Mesh(grid, AXES, axis_types=(jax.sharding.AxisType.Auto,) * len(AXES))


def check_hosts(*meshes: jax.sharding.Mesh) -> None:
    """Rejects meshes that leave out a host of this run."""
    hosts = {device.process_index for mesh in meshes for device in mesh.devices.flat}
    if idle := sorted(set(range(jax.process_count())) - hosts):
        raise UserError(
            f"the mesh has no device of process {', '.join(map(str, idle))}: give every host a "
            f"part of it, or start fewer hosts."
        )
