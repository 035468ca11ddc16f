"""Described TPUs have the hosts and devices of those that one rents."""

from collections import Counter

import pytest

from grpo_eqx.common.errors import UserError
from grpo_eqx.distributed.tpu_slices import find_slice, slice_of_grid
from grpo_eqx.planner.devices import described_devices


@pytest.mark.topology
@pytest.mark.parametrize(
    "name",
    [
        "v4-8",
        "v4-16",
        "v4-128",
        "v5e-1",
        "v5e-8",
        "v5e-16",
        "v5litepod-256",
        "v5p-8",
        "v5p-32",
        "v6e-1",
        "v6e-4",
        "v6e-8",
        "v6e-16",
        "v6e-256",
    ],
)
def test_hosts_and_devices(name: str) -> None:
    pytest.importorskip("libtpu", reason="needs the plan extra")
    known = find_slice(name)
    hosts = Counter(device.process_index for device in described_devices(name))
    assert hosts == dict.fromkeys(range(known.hosts), known.chips_per_host)


@pytest.mark.topology
def test_a_grid_is_the_slice_of_its_shape() -> None:
    pytest.importorskip("libtpu", reason="needs the plan extra")
    assert {device.process_index for device in described_devices("v6e:2x4")} == {0}


@pytest.mark.parametrize(
    ("grid", "name"),
    [
        ("v6e:2x4", "v6e-8"),
        ("v6e:4x4", "v6e-16"),
        ("v5e:4x4", "v5litepod-16"),
        ("v4:2x2x2", "v4-16"),
        ("v5p:2x2x2", "v5p-16"),
    ],
)
def test_grids_by_libtpus_names(grid: str, name: str) -> None:
    assert slice_of_grid(grid) == find_slice(name)


def test_a_grid_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(UserError, match=r"has the grid 'v5e:3x3': use one of v5e:1x1, v5e:2x2"):
        described_devices("v5e:3x3")


@pytest.mark.parametrize("name", ["v7x-8", "h100", "v6e", "h100:2x2", ""])
def test_what_is_not_known_is_one_line(name: str) -> None:
    with pytest.raises(UserError, match=r"unknown TPU type .*: use one of .* or local,") as error:
        described_devices(name)
    assert "\n" not in str(error.value)
