"""TPU slices that Google offers, by name."""

import itertools
import math
import re
from typing import NamedTuple

from grpo_eqx.common.errors import UserError, did_you_mean

_PLANES = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBES = (
    "2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16",
)  # fmt: skip
_CHIPS_PER_HOST = 4
_CHIPS_OF_ONE_HOST = 8
"""Most chips of a 2D slice on a single host; larger slices have four chips per host."""


class Slice(NamedTuple):
    """A TPU slice, with figures from Google's pages on TPUs."""

    name: str
    """Name in the Cloud TPU API: `v5litepod-16`, not `v5e-16`."""
    chips: int
    hosts: int
    topology: str
    runtime_version: str
    """Image of the slice's VMs."""
    gke_accelerator: str
    """Label of the slice's nodes in GKE."""

    @property
    def chips_per_host(self) -> int:
        return self.chips // self.hosts


class _Generation(NamedTuple):
    cores_per_chip: int
    """TensorCores per chip: the number in a slice's name counts TensorCores."""
    topologies: tuple[str, ...]
    runtime_version: str
    gke_accelerator: str


_GENERATIONS = {
    "v4": _Generation(2, _CUBES, "tpu-ubuntu2204-base", "tpu-v4-podslice"),
    "v5litepod": _Generation(1, _PLANES, "v2-alpha-tpuv5-lite", "tpu-v5-lite-podslice"),
    "v5p": _Generation(
        2, (*_CUBES, "16x16x16", "16x16x24"), "v2-alpha-tpuv5", "tpu-v5p-slice"
    ),
    "v6e": _Generation(1, _PLANES, "v2-alpha-tpuv6e", "tpu-v6e-slice"),
}  # fmt: skip
_ALIASES = {"v5e": "v5litepod"}


def find_slice(name: str) -> Slice:
    """Finds a slice by name; raises `UserError`, with the known names, for an unknown name."""
    match = re.fullmatch(r"(\w+)-(\d+)", name)
    generation = _ALIASES.get(match[1], match[1]) if match else ""
    if match is None or generation not in _GENERATIONS:
        every = [each.name for each in itertools.chain(*map(_slices, _GENERATIONS))]
        every += [f"v5e-{each.chips}" for each in _slices("v5litepod")]
        raise UserError(
            f"unknown TPU type {name!r}{did_you_mean(name, every, cutoff=0.85)}: use one of "
            f"{_names('v4')}; {_names('v5litepod')} (or v5e-N); {_names('v5p')}; {_names('v6e')}."
        )
    for known in _slices(generation):
        if known.name == f"{generation}-{match[2]}":
            return known
    raise UserError(f"TPU type {name} does not exist: use one of {_names(generation)}.")


def larger_slices(name: str) -> list[Slice]:
    """Returns the slices of the same generation with more chips, smallest first."""
    known = find_slice(name)
    return [other for other in _slices(known.name.partition("-")[0]) if other.chips > known.chips]


def slice_of_grid(grid: str) -> Slice | None:
    """Returns the slice whose chips form a grid, given by libtpu's name, such as `v6e:4x4`.

    Returns `None` for a name of an unknown generation, or without a grid; raises `UserError` for a
    grid that no slice has.
    """
    name, colon, topology = grid.partition(":")
    generation = _ALIASES.get(name, name)
    if generation not in _GENERATIONS or not colon:
        return None
    for known in _slices(generation):
        if known.topology == topology:
            return known
    grids = ", ".join(f"{name}:{each}" for each in _GENERATIONS[generation].topologies)
    raise UserError(f"no TPU slice has the grid {grid!r}: use one of {grids}.")


def _slices(generation: str) -> list[Slice]:
    cores, topologies, runtime_version, gke_accelerator = _GENERATIONS[generation]
    found = []
    for topology in topologies:
        sides = [int(side) for side in topology.split("x")]
        chips = math.prod(sides)
        one_host = len(sides) == 2 and chips <= _CHIPS_OF_ONE_HOST
        found.append(
            Slice(
                name=f"{generation}-{chips * cores}",
                chips=chips,
                hosts=1 if one_host else chips // _CHIPS_PER_HOST,
                topology=topology,
                runtime_version=runtime_version,
                gke_accelerator=gke_accelerator,
            )
        )
    return found


def _names(generation: str) -> str:
    return ", ".join(known.name for known in _slices(generation))
