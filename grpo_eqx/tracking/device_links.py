"""Rates of the links between devices, from published figures."""

from collections.abc import Sequence
from typing import Any, NamedTuple


class LinkRates(NamedTuple):
    """Rates at which a `jax.Device` receives, in bytes a second."""

    link: float
    """One direction of one link of a TPU's torus; all links of a GPU to others of its node."""
    network: float | None = None
    """A GPU's share of its node's network; `None` where a slice is one network of links."""


HOP_SECONDS = 1e-6
"""Latency of one hop from a TPU to the next: about a microsecond, according to the book named
below."""


def link_rates(device_kind: str) -> LinkRates | None:
    """Returns the rates of a `jax.Device.device_kind`, or `None` if no figure is certain."""
    return _RATES.get(device_kind)


def num_hops(devices: Sequence[Any]) -> int:
    """Returns the hops that data take, one after the other, to reach all devices of a group.

    TPUs send data one way along each axis of the torus, one axis after the other; other devices
    send data around a ring. The book named below also adds up the axes, and halves the sum because
    data can go both ways.
    """
    if devices[0].platform != "tpu":
        return len(devices) - 1
    along_axes = zip(*(device.coords for device in devices), strict=True)
    return sum(max(places) - min(places) for places in along_axes)


def wraps(grid: Sequence[int], axis: int) -> bool:
    """Returns whether the ends of an axis of a TPU slice's grid of chips are linked.

    In two dimensions, a full axis of 16 wraps around. In three, all axes do if the slice consists
    of whole cubes of 4x4x4.
    """
    if len([size for size in grid if size > 1]) < 3:
        return grid[axis] == _FULL_AXIS
    return all(size % _CUBE == 0 for size in grid)


_FULL_AXIS, _CUBE = 16, 4
# One-way rate of a link as measured by the JAX team, in "How to Scale Your Model"
# (jax-ml.github.io/scaling-book/tpus). Cloud TPU's pages give "bidirectional ICI bandwidth per
# chip", the sum over its links and both directions: v5e 400 GB/s over 4, v5p 1,200 over 6, v6e 800
# over 4. Wrap-around: the same book; "all 4x4x4 and larger slices have full 3D torus" on page v5p.
_V5E = LinkRates(45e9)
_V5P = LinkRates(90e9)
_V6E = LinkRates(90e9)
_TPUS = {
    "TPU v4": LinkRates(45e9),
    "TPU v5 lite": _V5E,
    "TPU v5e": _V5E,
    "TPU v5": _V5P,
    "TPU v5p": _V5P,
    "TPU v6 lite": _V6E,
    "TPU v6e": _V6E,
}
# NVLink: half of the bidirectional bandwidth in NVIDIA's data sheets of the A100 (600 GB/s), H100
# and H200 (900 GB/s) and HGX B200 (1,800 GB/s). Network: one adapter a GPU, as in NVIDIA's DGX
# A100 (200 Gb/s) and DGX H100, H200 and B200 (400 Gb/s).
_HOPPER = LinkRates(450e9, 50e9)
_GPUS = {
    "NVIDIA A100-SXM4-40GB": LinkRates(300e9, 25e9),
    "NVIDIA A100-SXM4-80GB": LinkRates(300e9, 25e9),
    "NVIDIA H100 80GB HBM3": _HOPPER,
    "NVIDIA H200": _HOPPER,
    "NVIDIA B200": LinkRates(900e9, 50e9),
}
_RATES = _TPUS | _GPUS
