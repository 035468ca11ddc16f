"""Moves data between host memory and arrays that span the devices of all hosts."""

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from grpo_eqx.distributed.exchange import bytes_from


def shard(tree: Any, sharding: jax.sharding.Sharding) -> Any:
    """Shards arrays that every host holds whole; each host sends its devices only their parts."""

    def one(x: Any) -> jax.Array:
        whole = np.asarray(x)
        dtype = jax.dtypes.canonicalize_dtype(whole.dtype)
        return jax.make_array_from_callback(
            whole.shape, sharding, lambda index: whole[index], dtype=dtype
        )

    return jax.tree.map(one, tree)


def fetch(tree: Any) -> Any:
    """Returns device arrays as NumPy arrays, whole on every host; all processes must call it.

    All leaves are arrays on devices, and on devices of the same processes. The results may be
    read-only.
    """
    leaves, treedef = jax.tree.flatten(tree)
    own = {device.process_index for x in leaves[:1] for device in x.sharding.device_set}
    if len(own) in (0, jax.process_count()):
        return fetch_own(tree)
    mine = fetch_own(leaves) if jax.process_index() in own else []
    sent = bytes_from(min(own), b"".join(x.tobytes() for x in mine))
    ends = np.cumsum([x.nbytes for x in leaves]).tolist()
    parts = [
        np.frombuffer(sent[end - x.nbytes : end], x.dtype).reshape(x.shape)
        for x, end in zip(leaves, ends, strict=True)
    ]
    return jax.tree.unflatten(treedef, parts)


def fetch_own(tree: Any) -> Any:
    """Returns device arrays as NumPy arrays; the processes that have some of them must call it."""
    if jax.process_count() > 1:
        tree = jax.tree.map(_everywhere, tree)
    return jax.device_get(tree)


def fetch_to_main(x: jax.Array) -> np.ndarray | None:
    """Returns a device array in process 0, which has some of it; all processes must call it."""
    x = _everywhere(x)
    return jax.device_get(x) if jax.process_index() == 0 else None


def _everywhere(x: Any) -> Any:
    """Replicates an array that no single host holds whole; returns anything else unchanged."""
    if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
        return x
    assert isinstance(x.sharding, NamedSharding)
    return jax.device_put(x, NamedSharding(x.sharding.mesh, PartitionSpec()))


def nowhere(x: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns an array of which this process has no part, from its shape and sharding."""
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, [], dtype=x.dtype)


def relabeled(x: jax.Array, sharding: jax.sharding.Sharding) -> jax.Array:
    """Returns the array with an equivalent sharding, without a copy.

    A program writes the shardings of its results in an equivalent form, for which other programs
    would be compiled again.
    """
    parts = [shard.data for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, sharding, parts, dtype=x.dtype)


def shapes_of(tree: Any, shardings: Any) -> Any:
    """Returns the shapes of arrays, or of their shapes, with their shardings."""

    def of(
        x: jax.Array | np.ndarray | jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding
    ) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(of, tree, shardings)
