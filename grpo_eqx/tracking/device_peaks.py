"""Peak rates of devices, from their vendors' figures."""

from typing import NamedTuple


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
