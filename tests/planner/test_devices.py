"""The devices that a plan is for, and what memory they have."""

import os

import jax
import pytest

from grpo_eqx import UserError
from grpo_eqx.planner.devices import find_target, local_target


def test_cpu_devices_share_the_memory_of_their_machine(monkeypatch, tmp_path) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr("grpo_eqx.sharding.device_memory._CGROUP_LIMIT", limit)
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    devices = jax.devices()
    assert find_target("local").usable_bytes == total // len(devices)
    assert local_target(devices[:1]).usable_bytes == total
    limit.write_text("max\n")
    assert local_target(devices[:1]).usable_bytes == total
    limit.write_text(f"{2**30}\n")
    assert local_target(devices[:2]).usable_bytes == 2**29


@pytest.mark.parametrize("name", ["v6e-7", "v9-8", "here"])
def test_an_unknown_topology_is_one_line(name) -> None:
    with pytest.raises(UserError, match="use one of") as error:
        find_target(name)
    assert "\n" not in str(error.value)


@pytest.mark.topology
@pytest.mark.parametrize(
    ("name", "gib"), [("v4-16", 30.75), ("v5e-16", 15.75), ("v5p-8", 95.74), ("v6e-8", 31.25)]
)
def test_the_compiler_says_what_programs_can_have(name, gib) -> None:
    pytest.importorskip("libtpu", reason="needs the plan extra")
    # Versions of it differ by some MiB.
    assert find_target(name).usable_bytes == pytest.approx(gib * 2**30, rel=1e-3)
