"""The links by which groups of devices exchange data."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from grpo_eqx.tracking.device_links import num_hops, wraps


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

    **Arguments:** the program's `jax.Device`s, in its order.
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
