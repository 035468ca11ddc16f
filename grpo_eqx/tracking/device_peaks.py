"""Peak rates of devices: vendors' figures, and measured rates of CPUs, which have none."""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

_ROUNDS = 10
_COPIES = 50
"""Copies of an array per call, so many that the time of the call itself does not matter."""
_PRODUCT_SIZES = (512, 1024, 2048)
_CACHED = tuple(2**exponent for exponent in range(16, 24))
"""Sizes, in float32 numbers, of arrays that fit the last-level cache of some CPU: 256 KiB to
32 MiB."""


class DevicePeaks(NamedTuple):
    """Peak rates of one `jax.Device`."""

    flops_per_second: float
    """Peak of matrix products in bfloat16, without sparsity."""
    bytes_per_second: float
    """Peak bandwidth of the device's main memory."""


def device_peaks(device_kind: str) -> DevicePeaks | None:
    """Returns the peaks of a `jax.Device.device_kind`, or `None` if no figure is certain."""
    return _PEAKS.get(device_kind)


# "Peak compute per chip (bf16)" and "HBM bandwidth" from docs.cloud.google.com/tpu/docs, pages v4,
# v5e, v5p, v6e and tpu7x. JAX exposes a TPU7x chip as two devices, each with half its peaks.
_V5E = DevicePeaks(197e12, 819e9)
_V5P = DevicePeaks(459e12, 2765e9)
_V6E = DevicePeaks(918e12, 1638e9)
_TPUS = {
    "TPU v4": DevicePeaks(275e12, 1200e9),
    "TPU v5 lite": _V5E,
    "TPU v5e": _V5E,
    "TPU v5": _V5P,
    "TPU v5p": _V5P,
    "TPU v6 lite": _V6E,
    "TPU v6e": _V6E,
    "TPU7x": DevicePeaks(2307e12 / 2, 7380e9 / 2),
}
# From NVIDIA's data sheets of the A100, H100, H200 and HGX B200; rates stated with sparsity are
# twice the dense rates used here.
_GPUS = {
    "NVIDIA A100-SXM4-40GB": DevicePeaks(312e12, 1555e9),
    "NVIDIA A100-PCIE-40GB": DevicePeaks(312e12, 1555e9),
    "NVIDIA A100-SXM4-80GB": DevicePeaks(312e12, 2039e9),
    "NVIDIA A100 80GB PCIe": DevicePeaks(312e12, 1935e9),
    "NVIDIA H100 80GB HBM3": DevicePeaks(1979e12 / 2, 3350e9),
    "NVIDIA H100 PCIe": DevicePeaks(1513e12 / 2, 2000e9),
    "NVIDIA H200": DevicePeaks(1979e12 / 2, 4800e9),
    "NVIDIA B200": DevicePeaks(4500e12 / 2, 7700e9),
}
_PEAKS = _TPUS | _GPUS


@functools.cache
def measured_peaks() -> DevicePeaks:
    """Measures rates of the local CPU that programs do not exceed, once in a process.

    The products are of float32 matrices. The bandwidth is the highest over several sizes of arrays
    that fit a cache, as many arrays of a program do.
    """
    return DevicePeaks(
        flops_per_second=product_rate(jnp.dtype("float32"), _PRODUCT_SIZES),
        bytes_per_second=copy_rate(_CACHED, copies=_COPIES),
    )


def product_rate(dtype: jnp.dtype, sizes: Sequence[int]) -> float:
    """Measures the FLOPs per second of the fastest product of square matrices of some sizes."""
    random = np.random.default_rng(0)
    multiply = jax.jit(lambda a: a @ a)
    rates = []
    for n in sizes:
        matrix = jnp.asarray(random.standard_normal((n, n)), dtype)
        rates.append(2.0 * n**3 / _least_time(multiply, matrix))
    return max(rates)


def copy_rate(sizes: Sequence[int], copies: int = 1) -> float:
    """Measures the bytes per second, read and written, of the fastest copy over several sizes.

    **Arguments:**

    - `sizes`: sizes of arrays, in float32 numbers.
    - `copies`: copies that a program makes, one after the other.
    """

    @jax.jit
    def copied(array: jax.Array) -> jax.Array:
        # Adding 1 keeps the compiler from removing the copies.
        return jax.lax.fori_loop(0, copies, lambda _, x: x + 1, array)

    rates = []
    for n in sizes:
        array = jnp.ones(n, jnp.float32)
        seconds = _least_time(copied, array) / copies
        rates.append(2.0 * array.nbytes / seconds)
    return max(rates)


def timed(run: Callable[[], Any]) -> float:
    """Measures the seconds of a call, until the device has done all that the call gave it."""
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def _least_time(run: Callable[[jax.Array], jax.Array], array: jax.Array) -> float:
    return min(timed(lambda: run(array)) for _ in range(_ROUNDS))
