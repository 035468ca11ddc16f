"""Rows of slots that read, and their way back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from grpo_eqx.generation.turns import _with_rows
from grpo_eqx.sharding import parse_mesh


@pytest.mark.parametrize("axis", [0, 1])
def test_rows_are_replaced_in_their_order_and_none_past_the_end(axis: int) -> None:
    x = jnp.moveaxis(jnp.arange(10).reshape(5, 2), 0, axis)
    rows = jnp.moveaxis(100 + jnp.arange(8).reshape(4, 2), 0, axis)
    found = jax.jit(_with_rows, static_argnums=3)(x, jnp.array([3, 5, 0, 7]), rows, axis)
    expected = np.moveaxis(np.array([[104, 105], [2, 3], [4, 5], [100, 101], [8, 9]]), 0, axis)
    np.testing.assert_array_equal(found, expected)


def test_so_they_are_in_a_devices_part_of_what_all_hold() -> None:
    """Where a scatter would write the next device's row."""
    mesh = parse_mesh("4,1,1").build(jax.devices()[:4])
    split = PartitionSpec("dp")

    def replaced(x: jax.Array, places: jax.Array) -> jax.Array:
        x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, split))
        rows = jnp.full((1,), 7)
        func = jax.shard_map(
            lambda x, places: _with_rows(x, places, rows, 0),
            mesh=mesh, in_specs=(split, split), out_specs=split, check_vma=False,
        )  # fmt: skip
        return func(x, places)

    whole = jax.device_put(10 * jnp.arange(8), NamedSharding(mesh, PartitionSpec()))
    places = jax.device_put(jnp.array([2, 2, 0, 2]), NamedSharding(mesh, split))
    assert jax.jit(replaced)(whole, places).tolist() == [0, 10, 20, 30, 7, 50, 60, 70]
