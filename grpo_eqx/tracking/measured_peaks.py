"""Rates that plain programs reach on the local devices, measured."""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_eqx.tracking.device_peaks import DevicePeaks

_ROUNDS = 10
_COPIES = 50
"""Copies of an array in a call, which the time of the call itself must not count against."""
_PRODUCT_SIZES = (512, 1024, 2048)
_CACHED = tuple(2**exponent for exponent in range(16, 24))
"""Sizes in float32 numbers of arrays that fit the last-level cache of some CPU: 256 KiB to 32 MiB.
"""


@functools.cache
def measured_peaks() -> DevicePeaks:
    """Measures rates of the local CPU that programs do not exceed, once in a process.

    Products are of float32 matrices. The bandwidth is that of arrays that fit a cache, as many of
    those of a program do: the highest over several sizes.
    """
    return DevicePeaks(
        flops_per_second=product_rate(jnp.dtype("float32"), _PRODUCT_SIZES),
        bytes_per_second=copy_rate(_CACHED, copies=_COPIES),
    )


def product_rate(dtype: jnp.dtype, sizes: Sequence[int]) -> float:
    """Measures the FLOPs a second of the best product of square matrices of some size."""
    random = np.random.default_rng(0)
    multiply = jax.jit(lambda a: a @ a)
    rates = []
    for n in sizes:
        matrix = jnp.asarray(random.standard_normal((n, n)), dtype)
        rates.append(2.0 * n**3 / _least_time(multiply, matrix))
    return max(rates)


def copy_rate(sizes: Sequence[int], copies: int = 1) -> float:
    """Measures the bytes a second of the best copy of an array of some size, read and written.

    **Arguments:** sizes in float32 numbers; the copies that a program makes, one after the other.
    """

    @jax.jit
    def copied(array: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, copies, lambda _, x: x + 1, array)

    rates = []
    for n in sizes:
        array = jnp.ones(n, jnp.float32)
        seconds = _least_time(copied, array) / copies
        rates.append(2.0 * array.nbytes / seconds)
    return max(rates)


def timed(run: Callable[[], Any]) -> float:
    """Measures the seconds of a call and everything that it leaves to the device."""
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def _least_time(run: Callable[[jax.Array], jax.Array], array: jax.Array) -> float:
    return min(timed(lambda: run(array)) for _ in range(_ROUNDS))
