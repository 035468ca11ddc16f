"""The layout that is printed and logged."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from grpo_eqx.sharding import LayoutReport, parse_mesh, parse_rollout_sharding


def report(mesh_name: str, num_devices: int) -> LayoutReport:
    mesh = parse_mesh(mesh_name).build(jax.devices()[:num_devices])
    layout = parse_rollout_sharding("legacy").layout(mesh, 8, 4)

    def split(size: int, *spec: str) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct((size,), jnp.float32, sharding=sharding)

    return LayoutReport.of(
        mesh, layout, [split(2**20, "fsdp"), split(8)], split(2**29, "fsdp"), None
    )  # fmt: skip


def test_it_counts_what_each_device_holds() -> None:
    found = report("2,4,1", 8)
    assert found.axes == {"dp": 2, "fsdp": 4, "tp": 1}
    assert (found.hosts, found.devices) == (1, 8)
    assert found.parameter_bytes == 2**20 + 32
    assert found.optimizer_bytes == 2**29
    assert found.reference_bytes == 0


def test_it_reads_as_a_person_would_ask() -> None:
    assert str(report("2,4,1", 8)).splitlines() == [
        "8 x cpu on 1 host; per device: 1.00 MiB of parameters, 512.00 MiB of optimizer state",
        "  dp=2: the batch is split; parameters and optimizer state are replicated",
        "  fsdp=4: the batch, parameters and optimizer state are split",
        "  rollout sharding legacy: each of the 8 devices decodes its own completions",
    ]
    assert "\n" not in str(report("auto", 1))
