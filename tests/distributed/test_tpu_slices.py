"""TPU slices: what Google's pages say of each type."""

import pytest

from grpo_eqx.common.errors import UserError
from grpo_eqx.distributed.tpu_slices import find_slice


@pytest.mark.parametrize(
    ("name", "chips", "hosts", "topology"),
    [
        ("v6e-1", 1, 1, "1x1"),
        ("v6e-4", 4, 1, "2x2"),
        ("v6e-8", 8, 1, "2x4"),
        ("v6e-16", 16, 4, "4x4"),
        ("v6e-32", 32, 8, "4x8"),
        ("v6e-256", 256, 64, "16x16"),
        ("v5litepod-8", 8, 1, "2x4"),
        ("v5litepod-16", 16, 4, "4x4"),
        ("v5litepod-256", 256, 64, "16x16"),
        ("v4-8", 4, 1, "2x2x1"),
        ("v4-16", 8, 2, "2x2x2"),
        ("v4-32", 16, 4, "2x2x4"),
        ("v4-128", 64, 16, "4x4x4"),
        ("v5p-8", 4, 1, "2x2x1"),
        ("v5p-16", 8, 2, "2x2x2"),
        ("v5p-64", 32, 8, "2x4x4"),
        ("v5p-4096", 2048, 512, "8x16x16"),
        ("v5p-12288", 6144, 1536, "16x16x24"),
    ],
)
def test_hosts_and_chips(name: str, chips: int, hosts: int, topology: str) -> None:
    found = find_slice(name)
    assert (found.name, found.chips, found.hosts, found.topology) == (name, chips, hosts, topology)
    assert found.chips_per_host * hosts == chips


@pytest.mark.parametrize(
    ("name", "version", "label"),
    [
        ("v6e-8", "v2-alpha-tpuv6e", "tpu-v6e-slice"),
        ("v5p-8", "v2-alpha-tpuv5", "tpu-v5p-slice"),
        ("v5e-8", "v2-alpha-tpuv5-lite", "tpu-v5-lite-podslice"),
        ("v4-8", "tpu-ubuntu2204-base", "tpu-v4-podslice"),
    ],
)
def test_what_runs_on_them(name: str, version: str, label: str) -> None:
    found = find_slice(name)
    assert (found.runtime_version, found.gke_accelerator) == (version, label)


def test_v5e_is_v5litepod() -> None:
    assert find_slice("v5e-16") == find_slice("v5litepod-16")
    assert find_slice("v5e-16").name == "v5litepod-16"


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("v6e-12", "v6e-1, v6e-4, v6e-8, v6e-16"),
        ("v6e-016", "v6e-16"),
        ("v4-4", "v4-8, v4-16"),
        ("v5e-2", "v5litepod-1"),
        ("v7x-8", r"'v7x-8': use one of .*v5e-N.*v6e-16"),
        ("v6-8", r"'v6-8' \(did you mean v6e-8\?\): use one of v4-8"),
        ("", "v6e-16"),
        ("v6e-16\n", "v6e-16"),
        ("v6e", "v6e-16"),
    ],
)
def test_others_are_refused_with_those_that_there_are(name: str, known: str) -> None:
    with pytest.raises(UserError, match=known):
        find_slice(name)
