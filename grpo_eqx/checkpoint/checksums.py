"""Checksums of arrays, by which a checkpoint is verified when it is loaded.

Orbax writes values without checksums: a flipped bit in them would load silently.
"""

import functools
import zlib
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

from grpo_eqx.sharding.arrays import fetch


def checksums(arrays: Mapping[str, Array | np.ndarray]) -> dict[str, int]:
    """Computes the checksum of each array, the same under any sharding.

    It is the sum, modulo 2^32, of the elements' bits, each times an odd number that its position
    decides. So any single changed element of at most 32 bits changes the sum.
    """
    return {name: int(value) for name, value in fetch(_compiled(dict(arrays))).items()}


def host_checksum(x: np.ndarray) -> int:
    """Computes the checksum of an array on the host, by its bytes."""
    return zlib.crc32(np.ascontiguousarray(x).tobytes())


def checksum_arrays(arrays: dict[str, Array]) -> dict[str, UInt32[Array, ""]]:
    """Computes the checksums on the devices."""
    return {name: _checksum(array) for name, array in arrays.items()}


_compiled = jax.jit(checksum_arrays)


def _checksum(x: Array) -> UInt32[Array, ""]:
    if x.dtype == bool:
        x = x.astype(jnp.uint8)
    bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    positions = (jax.lax.broadcasted_iota(jnp.uint32, x.shape, dim) for dim in range(x.ndim))
    position = functools.reduce(
        lambda sum_, pair: sum_ * jnp.uint32(pair[0]) + pair[1],
        zip(x.shape, positions, strict=True),
        jnp.uint32(0),
    )
    return jnp.sum(bits.astype(jnp.uint32) * (2 * position + 1), dtype=jnp.uint32)
