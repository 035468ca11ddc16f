"""Memory that a run takes, on devices and on hosts, as metrics and in words."""

import math
import re
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from grpo_eqx.distributed.exchange import gather_rows

_GIB = 2**30
_STATUS = Path("/proc/self/status")
_NAMES = "bytes_in_use_max_gib", "peak_bytes_in_use_max_gib", "host_peak_gib"


class MemoryGauge:
    """Gauge of the memory of the fullest device and of the largest process, over all processes."""

    def __init__(self, devices: Sequence[jax.Device]):
        self._devices = devices
        self._of_all: list[float] | None = None

    def meet(self) -> None:
        """Measures in all processes, which must call this together. A single process does nothing.

        Where the exchange is a program on the devices, it waits for all work that they were given.
        """
        if jax.process_count() > 1:
            self._of_all = np.fmax.reduce(gather_rows(np.array([self._own()]))).tolist()

    def metrics(self) -> dict[str, float]:
        """Returns GiB, as of now for a single process, else as of the latest `meet`.

        Figures that devices do not report are left out. CPU devices, which use the host's memory,
        report none.
        """
        values = self._own() if self._of_all is None else self._of_all
        pairs = zip(_NAMES, values, strict=True)
        return {f"memory/train/{name}": x / _GIB for name, x in pairs if not math.isnan(x)}

    def _own(self) -> list[float]:
        """Returns the bytes of this process in the order of `_NAMES`; NaN for unknown figures."""
        stats = [device.memory_stats() or {} for device in self._devices]
        of_devices = [_most(stats, "bytes_in_use"), _most(stats, "peak_bytes_in_use")]
        return [*of_devices, float(peak_resident_bytes())]


def peak_resident_bytes() -> int:
    """Returns the peak of the host memory of this process."""
    # Preferred where it exists: on Linux, `getrusage` counts the peak of the parent process too.
    if _STATUS.exists() and (match := re.search(r"^VmHWM:\s*(\d+) kB", _STATUS.read_text(), re.M)):
        return int(match[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _most(stats: Sequence[dict[str, Any]], name: str) -> float:
    """Returns the largest figure of the devices, NaN where a device does not report it."""
    if not all(name in each for each in stats):
        return math.nan
    return float(max(each[name] for each in stats))


def memory_in_use() -> tuple[str, str]:
    """Returns whose memory is known, and its peak, in words.

    Shows the fullest device of this process, or the process itself where devices report nothing.
    """
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [(each["peak_bytes_in_use"], each) for each in stats if "peak_bytes_in_use" in each]
    if peaks:
        peak, of = max(peaks, key=lambda pair: pair[0])
        limit = of.get("bytes_limit")
        return "memory", f"{peak / _GIB:.1f}" + (f"/{limit / _GIB:.0f} GiB" if limit else " GiB")
    return "RAM", f"{peak_resident_bytes() / _GIB:.1f} GiB"
