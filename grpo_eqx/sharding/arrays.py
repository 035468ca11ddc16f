"""Moves data between host memory and arrays that span the devices of all hosts."""

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from grpo_eqx.distributed.exchange import gather_rows
from grpo_eqx.errors import UserError


def place(tree: Any, sharding: jax.sharding.Sharding) -> Any:
    """Shards arrays of which every host has a whole copy; each host sends only its part."""

    def one(x: Any) -> jax.Array:
        whole = np.asarray(x)
        return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])

    return jax.tree.map(one, tree)


def fetch(tree: Any) -> Any:
    """Returns device arrays as NumPy arrays, whole on every host; all processes must call it."""
    if jax.process_count() > 1:
        tree = jax.tree.map(_everywhere, tree)
    return jax.device_get(tree)


def place_rows(own: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    """Concatenates the processes' rows along axis 0, in process order, as one sharded array.

    Correct for every device layout: hosts exchange rows where one needs rows that another has.
    **Arguments:** this process's rows, as many as every other's; the sharding of the whole array.
    Raises `UserError` for unequal numbers of rows.
    """
    counts = gather_rows(np.array([len(own)]))
    if len(set(counts.tolist())) > 1:
        raise UserError(f"the processes have {counts.tolist()} rows: give each the same number.")
    num_rows = len(own) * jax.process_count()
    first = jax.process_index() * len(own)
    shape = (num_rows, *own.shape[1:])
    if not _at_home(shape, sharding):
        own, first = gather_rows(own), 0

    def rows(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None  # `None` only for arrays without data
        start, stop, _ = index[0].indices(num_rows)
        return own[start - first : stop - first, *index[1:]]

    return jax.make_array_from_callback(shape, sharding, rows)


def fetch_rows(x: jax.Array) -> np.ndarray:
    """Returns this process's rows of an array: its equal share along axis 0, in process order.

    The inverse of `place_rows`. Rows on other hosts' devices are fetched from there. Raises
    `UserError` for rows that do not divide evenly among the processes.
    """
    if len(x) % jax.process_count():
        raise UserError(f"{len(x)} rows are no equal shares for {jax.process_count()} processes.")
    size = len(x) // jax.process_count()
    first = jax.process_index() * size
    if not _at_home(x.shape, x.sharding):
        return fetch(x)[first : first + size]
    own = np.zeros((size, *x.shape[1:]), x.dtype)
    for shard in x.addressable_shards:
        start, stop, _ = shard.index[0].indices(len(x))
        own[start - first : stop - first, *shard.index[1:]] = shard.data
    return own


def _everywhere(x: Any) -> Any:
    """Replicates an array that no single host holds whole; returns anything else unchanged."""
    if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
        return x
    assert isinstance(x.sharding, NamedSharding)
    return jax.device_put(x, NamedSharding(x.sharding.mesh, PartitionSpec()))


def _at_home(shape: tuple[int, ...], sharding: jax.sharding.Sharding) -> bool:
    """Returns whether each device has only rows of its own process's share; equal on all hosts."""
    size = shape[0] // jax.process_count()

    def is_home(device: jax.Device, index: tuple[slice, ...]) -> bool:
        start, stop, _ = index[0].indices(shape[0])
        return device.process_index * size <= start and stop <= (device.process_index + 1) * size

    return all(is_home(*item) for item in sharding.devices_indices_map(shape).items())
