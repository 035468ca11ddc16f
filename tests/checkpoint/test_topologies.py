"""Saving takes no memory of a TPU."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from grpo_eqx.checkpoint.checksums import checksum_arrays
from grpo_eqx.planner.devices import described_devices
from grpo_eqx.sharding import parse_mesh

pytest.importorskip("libtpu", reason="needs the plan extra")
pytestmark = pytest.mark.topology


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_checksums_hold_no_copy_of_the_arrays(dtype: jnp.dtype) -> None:
    """Neither of a device's own part nor of the whole."""
    mesh = parse_mesh("1,4,2").build(described_devices("v6e-8"))

    def array(shape: tuple[int, ...], *axes: str | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(
            shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes))
        )

    arrays = {
        "embed_tokens": array((151936, 896), "tp", "fsdp"),
        "layers.up_proj.weight": array((24, 896, 4864), None, "fsdp", "tp"),
        "norm.weight": array((896,)),
    }
    memory = jax.jit(checksum_arrays).lower(arrays).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 0.02 * memory.argument_size_in_bytes
