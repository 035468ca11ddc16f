"""Several processes become one run."""

from collections.abc import Mapping

import jax

from grpo_eqx.errors import UserError
from grpo_eqx.sharding.cluster import find_cluster
from grpo_eqx.sharding.rendezvous import meet


def initialize(
    facts: Mapping[str, str], *, require_processes: int | None = None, timeout: float = 120.0
) -> None:
    """Joins this process with the others of its run, if whatever started it says there are any.

    Nothing may have touched a device before. **Arguments:** what all processes must have been told
    the same; how many there must be (`None`: as many as there are said to be); seconds to wait for
    the others. Raises `UserError` where some are missing or disagree, in all that are there.
    """
    cluster = find_cluster()
    found = 1 if cluster is None else cluster.num_processes
    if require_processes is not None and found != require_processes:
        raise UserError(
            f"{found} {'process is' if found == 1 else 'processes are'} started, and "
            f"{require_processes} are required: start the same command on every host."
        )
    if cluster is None:
        return
    meet(cluster, facts, timeout)
    jax.distributed.initialize(*cluster, initialization_timeout=int(timeout))
