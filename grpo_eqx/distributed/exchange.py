"""Exchange of data between the processes of a run; trivial for a single process.

All processes must call these functions, in the same order.
"""

import bisect
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import jax
import numpy as np
from jax.experimental import multihost_utils

from grpo_eqx.common.errors import PeerError, PeerRunError, RunError, UserError
from grpo_eqx.distributed.store import Store

T = TypeVar("T")

_store: Store | None = None
_LEAST_BYTES = 256
_LONGEST_MESSAGE = 2000
_LONGEST_FACT = 200


def spare_devices() -> None:
    """Has processes exchange data without their devices, from now on.

    For runs in which some devices are busy with programs that the other processes do not call: an
    exchange by devices would wait for them, and processes could call both in another order.
    """
    global _store
    if _store is None and jax.process_count() > 1:
        _store = Store()


def gather_bytes(own: bytes) -> list[bytes]:
    """Gathers the bytes of every process, in the order of the processes."""
    if jax.process_count() == 1:
        return [own]
    if _store is not None:
        return _store.gather(own)
    lengths = _allgather(np.array([len(own)], np.int32)).reshape(-1)
    # The length is a power of two, because each shape compiles another program.
    padded = np.zeros(max(_LEAST_BYTES, 1 << int(lengths.max() - 1).bit_length()), np.uint8)
    padded[: len(own)] = np.frombuffer(own, np.uint8)
    received = _allgather(padded)
    return [row[:n].tobytes() for row, n in zip(received, lengths, strict=True)]


def gather_json(own: Any) -> list[Any]:
    """Gathers the values of every process, which must be valid JSON data, in their order."""
    if jax.process_count() == 1:
        return [own]
    return [json.loads(part) for part in gather_bytes(json.dumps(own).encode())]


def least(own: int) -> int:
    """Returns the least of the processes' numbers, in every process."""
    return min(int(number) for number in gather_bytes(str(own).encode()))


def gather_rows(own: np.ndarray) -> np.ndarray:
    """Concatenates the processes' arrays along dim 0, in process order; row counts may differ.

    Exact for every dtype: arrays are sent as bytes, because JAX would round 64-bit numbers.
    """
    parts = gather_bytes(np.ascontiguousarray(own).tobytes())
    shape = (-1, *own.shape[1:])
    return np.concatenate([np.frombuffer(part, own.dtype).reshape(shape) for part in parts])


def bytes_from(process: int, own: bytes) -> bytes:
    """Returns the bytes of a process, in every process; those of the others are not sent."""
    return gather_bytes(own if jax.process_index() == process else b"-")[process]


def own_share(number: int) -> slice:
    """Returns this process's slice of `number` items; slices are about equal, and may be empty."""
    index, count = jax.process_index(), jax.process_count()
    return slice(number * index // count, number * (index + 1) // count)


def own_part(places: Sequence[int], number: int) -> slice:
    """Returns the slice of ascending `places` that are this process's, of `number` places."""
    share = own_share(number)
    return slice(bisect.bisect_left(places, share.start), bisect.bisect_left(places, share.stop))


def from_main(value: T) -> T:
    """Returns process 0's value, which must be valid JSON data, in every process."""
    return cast(T, json.loads(gather_bytes(json.dumps(value).encode())[0]))


def on_any_host(flag: bool) -> bool:
    """Returns whether the flag is set in any process."""
    return any(part == b"1" for part in gather_bytes(b"1" if flag else b"0"))


def raise_on_all_hosts(work: Callable[[], T]) -> T:
    """Returns the result of `work`; if it raises in any process, all processes raise.

    For work that can fail on a single host, such as reading a file: the other hosts would wait for
    the failed one.
    """
    if jax.process_count() == 1:
        return work()
    try:
        result, failure = work(), None
    except Exception as error:
        failure = error
    said = "" if failure is None else f"{type(failure).__name__}: {failure}"[:_LONGEST_MESSAGE]
    of_input = isinstance(failure, UserError) and not isinstance(failure, RunError)
    # Every process learns whether any failed, so that none goes on to wait for the failed one.
    everyone = gather_json([said, of_input])
    if failure is not None:
        raise failure
    for index, (message, is_of_input) in enumerate(everyone):
        if message:
            kind = PeerError if is_of_input else PeerRunError
            raise kind(f"process {index} failed: {message}")
    return result


def assert_same_on_all_hosts(facts: Mapping[str, str]) -> None:
    """Raises `UserError`, with the fact and both values, unless all processes have equal facts."""
    everyone = gather_json(dict(facts))
    if difference := disagreement(dict(enumerate(everyone)), {}):
        raise UserError(difference)


def brief(fact: str) -> str:
    """Shortens a long fact to its start, its length and its hash, to be sent and shown."""
    if len(fact) <= _LONGEST_FACT:
        return fact
    digest = hashlib.sha256(fact.encode(errors="replace")).hexdigest()[:12]
    return f"{fact[:_LONGEST_FACT]}... ({len(fact)} characters, {digest})"


def disagreement(facts: Mapping[int, Mapping[str, str]], hosts: Mapping[int, str]) -> str:
    """Describes the first fact in which a process differs from process 0; "" if none differs.

    **Arguments:**

    - `facts`: the facts of each process.
    - `hosts`: the names of the processes' hosts, if known.
    """

    def named(process_id: int) -> str:
        host = f" ({hosts[process_id]})" if process_id in hosts else ""
        return f"process {process_id}{host}"

    for process_id, own in sorted(facts.items()):
        for name in {**facts[0], **own}:
            first, other = facts[0].get(name), own.get(name)
            if other != first:
                return (
                    f"the hosts disagree on {name}: {first} on {named(0)}, {other} on "
                    f"{named(process_id)}. Start all with the same value."
                )
    return ""


def _allgather(x: np.ndarray) -> np.ndarray:
    return np.asarray(multihost_utils.process_allgather(x))
