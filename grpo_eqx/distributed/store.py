"""Exchange of data by the service with which JAX coordinates processes, without their devices."""

import itertools
import struct
from typing import Any

import jax
from jax._src import distributed

_TIMEOUT_MS = 60_000
"""Milliseconds of one wait. There is another after it, as often as it takes: where a process is
gone, JAX ends the others."""


class Store:
    """Exchange between the processes of a run, which all make the same calls."""

    def __init__(self) -> None:
        self._client: Any = distributed.global_state.client
        self._numbers = itertools.count()

    def gather(self, own: bytes) -> list[bytes]:
        """Gathers the bytes of every process, in the order of the processes.

        Process 0 joins the parts: each process asks the service for one value, not for as many as
        there are processes.
        """
        number, index, count = next(self._numbers), jax.process_index(), jax.process_count()
        self._client.key_value_set_bytes(_part(number, index), own)
        if index == 0:
            parts = [self._wait_for(_part(number, i)) for i in range(count)]
            lengths = struct.pack(f"<{count}Q", *map(len, parts))
            self._client.key_value_set_bytes(_whole(number), lengths + b"".join(parts))
        whole = self._wait_for(_whole(number))
        if number > 0:  # all have read the values before, or they would not take part in this
            self._client.key_value_delete(_part(number - 1, index))
            if index == 0:
                self._client.key_value_delete(_whole(number - 1))
        start = 8 * count
        parts = []
        for length in struct.unpack(f"<{count}Q", whole[:start]):
            parts.append(whole[start : start + length])
            start += length
        return parts

    def _wait_for(self, key: str) -> bytes:
        while True:
            try:
                return bytes(self._client.blocking_key_value_get_bytes(key, _TIMEOUT_MS))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise


def _part(number: int, process: int) -> str:
    return f"grpo_eqx/exchange/{number}/{process}"


def _whole(number: int) -> str:
    return f"grpo_eqx/exchange/{number}/all"
