"""The devices that a collective joins, and the links between them."""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from grpo_eqx.tracking.device_links import num_hops, wraps

_LISTED = re.compile(r"replica_groups=\{\{([\d,]*)\}")
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? ?\{([^}]*)\}")
_AXIS = re.compile(r"'([^']+)'(?:=(\d+)|:\((\d+)\)(\d+))?")
_SHAPE = re.compile(r"^\[([\d,]+)\](?:T\(([\d,]+)\))?")
_PAIRS = re.compile(r"source_target_pairs=\{\{(\d+),(\d+)\}")


class Groups(NamedTuple):
    """Groups of devices, all of one size, that exchange data."""

    first: tuple[int, ...]
    """Devices of the first group, by their number in the program."""

    @property
    def size(self) -> int:
        """Devices of each group."""
        return len(self.first)

    @classmethod
    def of(cls, attributes: str, num_devices: int) -> "Groups":
        """Parses the attributes of a collective in a program of `num_devices`.

        Groups are listed, `{{0,1},{2,3}}`, or the rows of a reshaped and transposed range of
        numbers, `[2,2]<=[2,2]T(1,0)`, or axes of a mesh, `mesh['x'=2,'y'=2] {'y'}`; empty ones are
        a single group of all devices.
        """
        if match := _PAIRS.search(attributes):
            return cls((int(match[1]), int(match[2])))
        if match := _IOTA.search(attributes):
            size = int(match[2])
            return cls(tuple(map(int, _range(match[3], match[4])[:size])))
        if match := _MESH.search(attributes):
            return cls(_along_axes(*match.groups()))
        if (match := _LISTED.search(attributes)) and match[1]:
            return cls(tuple(int(x) for x in match[1].split(",")))
        return cls(tuple(range(num_devices)))


def _range(shape: str, order: str | None) -> Int[np.ndarray, " devices"]:
    """Returns a range of numbers after it was reshaped and transposed."""
    sizes = [int(x) for x in shape.split(",")]
    ids = np.arange(math.prod(sizes)).reshape(sizes)
    return (ids.transpose([int(x) for x in order.split(",")]) if order else ids).reshape(-1)


def _along_axes(axes: str, devices: str | None, along: str) -> tuple[int, ...]:
    """Returns the first devices of a mesh along some of its axes, or parts of axes."""
    sizes = {name: int(size) for name, size, _, _ in _AXIS.findall(axes)}
    if devices is None:
        ids = np.arange(math.prod(sizes.values()))
    elif match := _SHAPE.search(devices):
        ids = _range(match[1], match[2])
    else:
        ids = np.array([int(x) for x in devices.split(",")])
    chosen = {
        name: (int(before or 1), int(part or 0)) for name, _, before, part in _AXIS.findall(along)
    }
    shape, picks = list[int](), list[slice | int]()
    for name, size in sizes.items():
        before, part = chosen.get(name, (size, 1))
        part = part or size
        shape += [before, part, size // (before * part)]
        picks += [0, slice(None), 0]
    return tuple(map(int, ids.reshape(shape)[tuple(picks)].reshape(-1)))


class Route(NamedTuple):
    """Links by which a device receives the data of a collective."""

    kind: str
    """`ici`, `nvlink`, `network` or `memory`."""
    links: int = 1
    """Links of the device that has the fewest, along the directions in which its group extends."""


FindRoute = Callable[[Sequence[int]], tuple[Route, int]]
"""Returns the links that join a group of devices, given by their numbers in the program, and the
hops that data take to reach all of them, where these take time."""


def route_finder(devices: Sequence[Any]) -> FindRoute:
    """Returns the function that finds the links between devices of one kind.

    **Arguments:**

    - `devices`: the program's `jax.Device`s, in its order.
    """
    platform = devices[0].platform
    if platform == "cpu":
        return lambda group: (Route("memory"), 0)
    if platform != "tpu":

        def between_gpus(group: Sequence[int]) -> tuple[Route, int]:
            nodes = {devices[number].slice_index for number in group}
            return Route("nvlink" if len(nodes) == 1 else "network"), 0

        return between_gpus
    coordinates = [device.coords for device in devices]
    grid = [max(sizes) + 1 for sizes in zip(*coordinates, strict=True)]

    def between_tpus(group: Sequence[int]) -> tuple[Route, int]:
        links = sum(_links(grid, axis, coordinates, group) for axis in axes)
        return Route("ici", max(1, links)), num_hops([devices[number] for number in group])

    axes = range(len(grid))
    return between_tpus


def _links(
    grid: Sequence[int], axis: int, coordinates: Sequence[Sequence[int]], group: Sequence[int]
) -> int:
    """Counts the links along an axis of a device at the end of its group: two in a ring."""
    extent = len({coordinates[number][axis] for number in group})
    if extent == 1:
        return 0
    return 2 if extent == grid[axis] and wraps(grid, axis) else 1
