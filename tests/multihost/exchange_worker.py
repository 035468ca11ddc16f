"""One process of several, with every kind of exchange between them; ends with 0 where all is right.

python exchange_worker.py
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import xla_bridge

from grpo_eqx.common.errors import PeerError, PeerRunError, UserError
from grpo_eqx.distributed.exchange import (
    assert_same_on_all_hosts,
    gather_bytes,
    gather_rows,
    own_share,
    raise_on_all_hosts,
    spare_devices,
)
from grpo_eqx.distributed.startup import initialize, is_main, prepare_to_send
from grpo_eqx.sharding.arrays import fetch, shard


def all_devices_of_the_host_are_this_process() -> None:
    """Though a scheduler's variables give each task one of them."""
    assert xla_bridge.CUDA_VISIBLE_DEVICES.value == "all"
    assert jax.local_device_count() == 4


def bytes_of_any_length() -> None:
    index, count = jax.process_index(), jax.process_count()
    for factor in (0, 1, 300):
        expected = [bytes([i]) * (factor * i) for i in range(count)]
        assert gather_bytes(expected[index]) == expected


def counters_beyond_32_bits() -> None:
    index, count = jax.process_index(), jax.process_count()
    for dtype in (np.int64, np.uint64, np.float64):
        own = np.array([[2**40 + index, 2**53 - 1 - index]], dtype)
        gathered = gather_rows(own)
        assert gathered.dtype == dtype
        assert gathered.tolist() == [[2**40 + i, 2**53 - 1 - i] for i in range(count)]


def shares_of_any_number() -> None:
    for number in range(12):
        share = np.arange(number)[own_share(number)]
        assert gather_rows(share).tolist() == list(range(number))


def whole_arrays_on_any_mesh() -> None:
    index_of_devices = np.random.default_rng(1).permutation(jax.device_count())
    count = jax.process_count()
    whole = np.random.default_rng(0).normal(size=(4 * count, 8)).astype(np.float32)
    devices = np.array(jax.devices())
    specs = [("a",), (("a", "b"),), ("b", "a"), (None, "a"), ("b",), ()]
    for order, spec in itertools.product(
        [devices, devices[::-1], devices[index_of_devices]], specs
    ):
        mesh = jax.sharding.Mesh(order.reshape(count, -1), ("a", "b"))
        sharding = jax.NamedSharding(mesh, jax.P(*spec))
        for dtype in (jnp.float32, jnp.bfloat16):
            x = shard(whole.astype(dtype), sharding)
            assert x.sharding == sharding
            np.testing.assert_array_equal(fetch(x), whole.astype(dtype))


def failures_of_one_are_failures_of_all() -> None:
    def work() -> int:
        if jax.process_index() == 1:
            raise ValueError("no such file")
        return jax.process_index()

    failed = jax.process_index() == 1
    message = "^no such file" if failed else "^process 1 failed: ValueError: no such file"
    with pytest.raises(ValueError if failed else PeerRunError, match=message):
        raise_on_all_hosts(work)

    def refuse() -> None:
        if is_main():
            raise UserError("no such setting")

    message = "^no such setting" if is_main() else "^process 0 failed: UserError"
    with pytest.raises(UserError if is_main() else PeerError, match=message):
        raise_on_all_hosts(refuse)
    assert raise_on_all_hosts(lambda: 3) == 3


def disagreement_is_named() -> None:
    assert_same_on_all_hosts({"the data": "abc"})
    with pytest.raises(UserError, match="disagree on the tokenizer: xyz on process 0, uvw on pro"):
        assert_same_on_all_hosts(
            {"the data": "abc", "the tokenizer": "xyz" if is_main() else "uvw"}
        )


def arrays_of_some_processes_are_known_to_all() -> None:
    """And those of others get there."""
    devices, half = np.array(jax.devices()), jax.device_count() // 2
    whole = np.random.default_rng(0).normal(size=(2 * half, 8))
    for dtype in (jnp.float32, jnp.bfloat16):
        shardings = [
            jax.NamedSharding(jax.sharding.Mesh(of_half, ("a",)), jax.P("a"))
            for of_half in (devices[half:], devices[:half])
        ]
        x = shard(whole.astype(dtype), shardings[0])
        np.testing.assert_array_equal(fetch({"x": x})["x"], whole.astype(dtype))
        np.testing.assert_array_equal(fetch(jax.device_put(x, shardings[1])), whole.astype(dtype))


if __name__ == "__main__":
    prepare_to_send()
    initialize()
    all_devices_of_the_host_are_this_process()
    for _ in range(2):
        bytes_of_any_length()
        counters_beyond_32_bits()
        shares_of_any_number()
        whole_arrays_on_any_mesh()
        failures_of_one_are_failures_of_all()
        disagreement_is_named()
        spare_devices()
    arrays_of_some_processes_are_known_to_all()
