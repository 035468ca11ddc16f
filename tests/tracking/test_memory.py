"""Memory of devices and processes."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from grpo_eqx.tracking import memory
from grpo_eqx.tracking.memory import MemoryGauge, peak_resident_bytes

GIB = 2**30


@dataclasses.dataclass
class Device:
    """A device that reports figures, as those of accelerators do."""

    stats: dict[str, int] | None

    def memory_stats(self) -> dict[str, int] | None:
        return self.stats


def devices(*pairs: tuple[int, int]) -> Any:
    names = "bytes_in_use", "peak_bytes_in_use"
    return [Device({name: x * GIB for name, x in zip(names, pair, strict=True)}) for pair in pairs]


@pytest.fixture(autouse=True)
def untyped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the gauge take devices that are not JAX's."""
    init = MemoryGauge.__init__
    monkeypatch.setattr(MemoryGauge, "__init__", getattr(init, "__wrapped__", init))


def test_a_process_on_cpus_shows_its_own_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the peak that `getrusage` has of the process that started it."""
    monkeypatch.setattr(memory, "peak_resident_bytes", lambda: 3 * GIB)
    assert memory.memory_in_use() == ("RAM", "3.0 GiB")


def test_the_fullest_device_counts() -> None:
    found = MemoryGauge(devices((3, 7), (5, 6))).metrics()
    assert found["memory/train/bytes_in_use_max_gib"] == 5
    assert found["memory/train/peak_bytes_in_use_max_gib"] == 7


def test_of_several_processes_the_largest_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    others = np.array([[9.0, 1.0, 2.0], [4.0, 8.0, 1e6]]) * GIB
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    monkeypatch.setattr(memory, "gather_rows", lambda own: np.concatenate([own, others]))
    gauge = MemoryGauge(devices((3, 7)))
    gauge.meet()
    assert gauge.metrics() == {
        "memory/train/bytes_in_use_max_gib": 9,
        "memory/train/peak_bytes_in_use_max_gib": 8,
        "memory/train/host_peak_gib": 1e6,
    }


def test_devices_that_report_nothing_have_no_metrics() -> None:
    assert jax.local_devices()[0].memory_stats() is None, "a CPU reports nothing"
    (name,) = MemoryGauge(jax.local_devices()).metrics()
    assert name == "memory/train/host_peak_gib"
    some = MemoryGauge([*devices((3, 7)), Device(None)]).metrics()
    assert "memory/train/bytes_in_use_max_gib" not in some


def test_the_peak_of_a_process_is_what_the_system_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = np.ones(2**26, np.uint8)
    assert peak_resident_bytes() > block.nbytes
    status = tmp_path / "status"
    monkeypatch.setattr(memory, "_STATUS", status)
    status.write_text("VmPeak:\t 9 kB\nVmHWM:\t    2048 kB\nVmRSS:\t 1 kB\n")
    assert peak_resident_bytes() == 2 * 2**20
    status.write_text("Name: python\n")  # of a system that says less
    assert peak_resident_bytes() > block.nbytes
