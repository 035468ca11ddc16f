"""Finds the number of processes and the rank of this process, as their launcher declares them."""

import os
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from grpo_eqx.common.errors import UserError, listed
from grpo_eqx.distributed import tpu_metadata

COORDINATOR = "JAX_COORDINATOR_ADDRESS"
NUM_PROCESSES = "JAX_NUM_PROCESSES"
PROCESS_ID = "JAX_PROCESS_ID"
"""Environment variables that `jax.distributed.initialize` reads too."""
JOB = "GRPO_EQX_JOB"
"""Environment variable with a name that a launcher makes for each launch of processes."""
_PORT = 8476
"""Default port of the coordinator."""


class Cluster(NamedTuple):
    """The processes of a run, and the place of this process among them."""

    coordinator: str
    """`host:port` of process 0."""
    num_processes: int
    process_id: int
    hosts: tuple[str, ...] = ()
    """Hosts of all processes, if known."""
    local_device_ids: int | None = None
    """The single device of its host that this process uses; `None` for all devices."""
    job: str = ""
    """Name of this start of the processes, if their launcher gives one."""


def find_cluster(environment: Mapping[str, str] = os.environ) -> Cluster | None:
    """Finds the processes of a run; returns `None` for a single process.

    Reads the first of these that declares processes: JAX's variables, the variables of TPU workers
    (GKE), Slurm's variables, the metadata server of a TPU VM. Raises `UserError` for declarations
    that contradict themselves, or name several slices.
    """
    if environment.get("MEGASCALE_NUM_SLICES", "1") != "1":
        raise UserError("several TPU slices in one run are not supported: use one slice.")
    for find in _DECLARED.values():
        if (cluster := find(environment)) is not None:
            return _checked(cluster)
    worker = tpu_metadata.worker(environment)
    if worker is None or len(worker.hosts) == 1:
        _refuse_torchrun(environment)
        return None
    return _checked(_of_hosts(worker.hosts, worker.number))


def declared_by(environment: Mapping[str, str] = os.environ) -> str:
    """Names the source that declares the processes of a run to `find_cluster`."""
    found = (name for name, find in _DECLARED.items() if find(environment) is not None)
    return next(found, "the TPU VM's metadata server")


def _refuse_torchrun(environment: Mapping[str, str]) -> None:
    """Rejects processes of torchrun and accelerate, each of which would be a run of its own."""
    size = environment.get("WORLD_SIZE", "1")
    if size not in ("", "1") and "RANK" in environment:
        raise UserError(
            f"WORLD_SIZE is {size}, as torchrun and accelerate set it, and they are not read: JAX "
            f"uses all devices of a host from one process; for several hosts use grpo-eqx launch, "
            f"or give --coordinator-address, --num-processes and --process-id."
        )


def _of_jax(environment: Mapping[str, str]) -> Cluster | None:
    names = (COORDINATOR, NUM_PROCESSES, PROCESS_ID)
    given = [environment.get(name, "") for name in names]
    if not any(given):
        return None
    if missing := [name for name, value in zip(names, given, strict=True) if not value]:
        raise UserError(
            f"{listed(missing)} must be set too: the address of process 0, the number of "
            f"processes and the number of this one (from 0) go together."
        )
    return Cluster(
        given[0],
        _number(NUM_PROCESSES, environment),
        _number(PROCESS_ID, environment),
        job=environment.get(JOB, ""),
    )


def _of_tpu_workers(environment: Mapping[str, str]) -> Cluster | None:
    hosts = [host for host in environment.get("TPU_WORKER_HOSTNAMES", "").split(",") if host]
    if not hosts or (len(hosts) == 1 and "TPU_WORKER_ID" not in environment):
        return None
    return _of_hosts(hosts, _number("TPU_WORKER_ID", environment))


def _of_hosts(hosts: Sequence[str], process_id: int) -> Cluster:
    return Cluster(f"{hosts[0]}:{_PORT}", len(hosts), process_id, tuple(hosts))


def _of_slurm(environment: Mapping[str, str]) -> Cluster | None:
    nodes = environment.get("SLURM_STEP_NODELIST")
    if nodes is None:  # not started by srun
        return None
    # A port that is open to users, chosen by job, because several jobs can share a node.
    port = 61440 + _number("SLURM_JOB_ID", environment) % 4096
    # The tasks of the step, not of the job: an interactive step has a single task.
    num_tasks = _number("SLURM_STEP_NUM_TASKS", environment)
    step = environment.get("SLURM_STEP_ID", "")
    one_each = num_tasks > _number("SLURM_STEP_NUM_NODES", environment)
    return Cluster(
        f"{_first_node(nodes)}:{port}",
        num_tasks,
        _number("SLURM_PROCID", environment),
        local_device_ids=_number("SLURM_LOCALID", environment) if one_each else None,
        job=f"{environment['SLURM_JOB_ID']}.{step}" if step else "",
    )


def _first_node(nodes: str) -> str:
    """Returns the first node of Slurm's list, such as `tpu[07-09,12],gpu3`."""
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+))?", nodes)
    if match is None:
        raise UserError(f"SLURM_STEP_NODELIST is {nodes!r}, which names no node.")
    return match[1] + (match[2] or "")


def _number(name: str, environment: Mapping[str, str]) -> int:
    text = environment.get(name, "")
    if not text.isdecimal():
        raise UserError(f"{name} is {text!r}: it must be a number.")
    return int(text)


def _checked(cluster: Cluster) -> Cluster | None:
    """Returns the processes, or `None` for a single one; raises `UserError` for impossible ones."""
    if cluster.process_id >= cluster.num_processes:
        raise UserError(
            f"this is process {cluster.process_id} of {cluster.num_processes}, but processes "
            f"count from 0: raise the number of processes, or lower the number of this one."
        )
    if cluster.num_processes == 1:
        return None
    host, _, port = cluster.coordinator.rpartition(":")
    try:
        is_address = bool(host.encode("idna")) and port.isdecimal() and 0 < int(port) < 2**16
    except UnicodeError:  # such as for an empty part
        is_address = False
    if not is_address:
        raise UserError(
            f"the coordinator's address is {cluster.coordinator!r}: it must be host:port."
        )
    return cluster


_DECLARED = {
    "JAX's variables": _of_jax,
    "the TPU's workers": _of_tpu_workers,
    "Slurm": _of_slurm,
}
"""Sources in the environment that can declare processes, by precedence."""
