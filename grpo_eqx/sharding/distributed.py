"""Several processes become one run."""

import os
from collections import Counter
from collections.abc import Mapping

import jax

from grpo_eqx.errors import UserError
from grpo_eqx.sharding.cluster import find_cluster
from grpo_eqx.sharding.exchange import agree
from grpo_eqx.sharding.rendezvous import meet

REQUIRE_PROCESSES = "GRPO_EQX_REQUIRE_PROCESSES"
"""The variable by which a launcher says how many processes it starts."""
START_TIMEOUT = 30.0
"""Seconds to wait for the other processes."""
_HEARTBEAT_SECONDS = 30
"""After so long without a word from one of them, the others end too."""


def initialize(
    facts: Mapping[str, str] | None = None,
    *,
    require_processes: int | None = None,
    timeout: float = START_TIMEOUT,
) -> None:
    """Joins this process with the others of its run, if whatever started it says there are any.

    Nothing may have touched a device before. Once joined, it only compares the facts.

    **Arguments:** what all processes must have been told the same; how many there must be (`None`:
    what the variable `GRPO_EQX_REQUIRE_PROCESSES` says, or as many as there are said to be);
    seconds to wait for the others.

    Raises `UserError`, in all that are there, where some are missing or disagree, or where hosts
    have different numbers of devices.
    """
    facts = {} if facts is None else facts
    required = _required() if require_processes is None else require_processes
    if jax.distributed.is_initialized():
        _check_number(jax.process_count(), required)
        agree(facts)
        return
    cluster = find_cluster()
    _check_number(1 if cluster is None else cluster.num_processes, required)
    if cluster is None:
        return
    meet(cluster, facts, timeout)
    try:
        jax.distributed.initialize(
            cluster.coordinator,
            cluster.num_processes,
            cluster.process_id,
            initialization_timeout=int(timeout) + 1,
            heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
        )
    except RuntimeError as error:
        raise UserError(
            f"this process cannot join the others any more ({error}): make the GRPOTrainer before "
            f"any array, or call grpo_eqx.sharding.initialize() first."
        ) from error
    check_even(Counter(device.process_index for device in jax.devices()))


def is_main() -> bool:
    """Whether this process is the one that writes and prints."""
    return jax.process_index() == 0


def check_even(num_devices: Mapping[int, int]) -> None:
    """Raises `UserError` where processes have different numbers of devices."""
    if len(set(num_devices.values())) > 1:
        raise UserError(
            f"the hosts have different numbers of devices, by process: "
            f"{dict(sorted(num_devices.items()))}. Give every host the same, or leave out the one "
            f"that differs."
        )


def _required() -> int | None:
    text = os.environ.get(REQUIRE_PROCESSES)
    if text is None:
        return None
    if not text.isdecimal():
        raise UserError(f"{REQUIRE_PROCESSES} is {text!r}: it must be a number.")
    return int(text)


def _check_number(found: int, required: int | None) -> None:
    if required is not None and found != required:
        raise UserError(
            f"{found} {'process is' if found == 1 else 'processes are'} started, and "
            f"{required} are required: start the same command on every host."
        )
