"""Between the memory of hosts and arrays that lie on the devices of all of them."""

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from grpo_eqx.distributed.exchange import gather_rows
from grpo_eqx.errors import UserError


def place(tree: Any, sharding: jax.sharding.Sharding) -> Any:
    """Arrays that every host has whole, laid out by `sharding`; each host sends only its part."""

    def one(x: Any) -> jax.Array:
        whole = np.asarray(x)
        return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])

    return jax.tree.map(one, tree)


def fetch(tree: Any) -> Any:
    """The devices' arrays as NumPy's, whole on every host; all processes must ask for them."""
    if jax.process_count() > 1:
        tree = jax.tree.map(_everywhere, tree)
    return jax.device_get(tree)


def place_rows(own: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    """The processes' rows as one array along axis 0, in the order of processes.

    Right for every layout of devices. Where one needs rows that another host has, hosts exchange
    them. **Arguments:** this process' rows, as many as every other's; how the whole is laid out.
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
        assert index is not None  # only for arrays without data
        start, stop, _ = index[0].indices(num_rows)
        return own[start - first : stop - first, *index[1:]]

    return jax.make_array_from_callback(shape, sharding, rows)


def fetch_rows(x: jax.Array) -> np.ndarray:
    """This process' rows of an array: its equal share along axis 0, in the order of processes.

    The inverse of `place_rows`. Rows that lie on other hosts' devices come from them. Raises
    `UserError` for rows that processes cannot have equal shares of.
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
    """A copy on every device of an array that no single host has whole."""
    if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
        return x
    assert isinstance(x.sharding, NamedSharding)
    return jax.device_put(x, NamedSharding(x.sharding.mesh, PartitionSpec()))


def _at_home(shape: tuple[int, ...], sharding: jax.sharding.Sharding) -> bool:
    """Whether all devices hold rows of their own process' share only; the same on all hosts."""
    size = shape[0] // jax.process_count()

    def is_home(device: jax.Device, index: tuple[slice, ...]) -> bool:
        start, stop, _ = index[0].indices(shape[0])
        return device.process_index * size <= start and stop <= (device.process_index + 1) * size

    return all(is_home(*item) for item in sharding.devices_indices_map(shape).items())
