"""Memory that a run takes, on devices and on hosts."""

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
    """Gauge of the fullest device's memory, and of the largest process', of all processes."""

    def __init__(self, devices: Sequence[jax.Device]):
        """**Arguments:** the devices of this process."""
        self._devices = devices
        self._of_all: list[float] | None = None

    def meet(self) -> None:
        """Measures in all processes, which must call this together; nothing for a single one.

        The exchange is a program for the devices, so that it waits for all that they were given.
        """
        if jax.process_count() > 1:
            self._of_all = np.fmax.reduce(gather_rows(np.array([self._own()]))).tolist()

    def metrics(self) -> dict[str, float]:
        """Returns GiB, as of now for a single process, else as of the latest `meet`.

        What no device reports is left out: those of CPUs, which use the host's memory, report none.
        """
        values = self._own() if self._of_all is None else self._of_all
        pairs = zip(_NAMES, values, strict=True)
        return {f"memory/train/{name}": x / _GIB for name, x in pairs if not math.isnan(x)}

    def _own(self) -> list[float]:
        """Returns bytes in this process, by `_NAMES`; NaN for what is not known."""
        stats = [device.memory_stats() or {} for device in self._devices]
        of_devices = [_most(stats, "bytes_in_use"), _most(stats, "peak_bytes_in_use")]
        return [*of_devices, float(peak_resident_bytes())]


def peak_resident_bytes() -> int:
    """Returns the most memory of the host that this process has had at a time."""
    # First, where it is available: on Linux, `getrusage` counts the peak of the parent process too.
    if _STATUS.exists() and (match := re.search(r"^VmHWM:\s*(\d+) kB", _STATUS.read_text(), re.M)):
        return int(match[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _most(stats: Sequence[dict[str, Any]], name: str) -> float:
    """Returns the largest of the devices' figures, NaN where a device does not report it."""
    if not all(name in each for each in stats):
        return math.nan
    return float(max(each[name] for each in stats))
