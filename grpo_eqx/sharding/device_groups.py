"""Groups of neighboring devices: another view of a mesh, for a rollout of its own layout."""

import math
from typing import NamedTuple

import jax

from grpo_eqx.sharding.mesh import AXES


class DeviceGroups(NamedTuple):
    """A mesh of the same devices in the same order, in which `dp`, `fsdp` and `tp` count groups.

    A program can hold arrays in both meshes, and move them from one to the other.
    """

    mesh: jax.sharding.Mesh
    within: tuple[str, ...]
    """Axes within a group, of two devices each where the size is a power of two, so that what does
    not divide by all of them can be split over some. Those along `tp` come first, so that a
    dimension split over `tp` is only cut further."""

    @classmethod
    def of(cls, mesh: jax.sharding.Mesh, size: int) -> "DeviceGroups":
        """Cuts each axis of a mesh, from the last on, until groups have `size` devices.

        The size must divide the number of devices.
        """
        names, shape, within = list[str](), list[int](), list[str]()
        for axis in reversed(AXES):
            inside = math.gcd(size, mesh.shape[axis])
            size //= inside
            factors = _prime_factors(inside)
            inner = [f"{axis}_{i}" for i in range(1, len(factors) + 1)]
            names = [axis, *inner, *names]
            shape = [mesh.shape[axis] // inside, *factors, *shape]
            within += inner
        assert size == 1, "groups of equal size"
        types = (jax.sharding.AxisType.Auto,) * len(names)
        grid = mesh.devices.reshape(shape)
        return cls(jax.sharding.Mesh(grid, tuple(names), axis_types=types), tuple(within))


def _prime_factors(number: int) -> list[int]:
    factors, divisor = list[int](), 2
    while number > 1:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return factors
