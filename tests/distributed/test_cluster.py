"""What a scheduler's variables say of the processes of a run."""

import pytest

from grpo_eqx.common.errors import UserError
from grpo_eqx.distributed.cluster import Cluster, find_cluster

JAX = {
    "JAX_COORDINATOR_ADDRESS": "tpu-0:8476",
    "JAX_NUM_PROCESSES": "4",
    "JAX_PROCESS_ID": "3",
}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        (JAX, Cluster("tpu-0:8476", 4, 3)),
        ({**JAX, "JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}, None),
        (
            {"TPU_WORKER_HOSTNAMES": "job-0.svc,job-1.svc", "TPU_WORKER_ID": "1"},
            Cluster("job-0.svc:8476", 2, 1, ("job-0.svc", "job-1.svc")),
        ),
        ({"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}, None),
        (
            {
                "SLURM_JOB_ID": "4097",
                "SLURM_STEP_NODELIST": "tpu[07-09,12],gpu3",
                "SLURM_STEP_NUM_TASKS": "5",
                "SLURM_STEP_NUM_NODES": "5",
                "SLURM_PROCID": "2",
            },
            Cluster("tpu07:61441", 5, 2),
        ),
        (  # two tasks a node: each has a device of its own
            {
                "SLURM_JOB_ID": "0",
                "SLURM_STEP_NODELIST": "a[1-2]",
                "SLURM_STEP_NUM_TASKS": "4",
                "SLURM_STEP_NUM_NODES": "2",
                "SLURM_PROCID": "3",
                "SLURM_LOCALID": "1",
                "SLURM_STEP_ID": "7",
            },
            Cluster("a1:61440", 4, 3, local_device_ids=1, job="0.7"),
        ),
        # in a batch script, but not by srun: the job's variables are those of no process
        ({"SLURM_JOB_ID": "4097", "SLURM_NTASKS": "5", "SLURM_PROCID": "0"}, None),
    ],
)
def test_processes_are_found(environment: dict[str, str], expected: Cluster | None) -> None:
    assert find_cluster(environment) == expected


@pytest.mark.parametrize(
    ("nodes", "first"), [("a1", "a1"), ("a1,b2", "a1"), ("n[3,5-6]", "n3"), ("n[003-010]", "n003")]
)
def test_the_first_of_slurms_nodes_is_the_coordinator(nodes: str, first: str) -> None:
    environment = {
        "SLURM_JOB_ID": "0",
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_PROCID": "0",
    }
    assert find_cluster(environment) == Cluster(f"{first}:61440", 2, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"JAX_PROCESS_ID": ""}, "JAX_PROCESS_ID must be set too"),
        ({"JAX_PROCESS_ID": "x"}, "JAX_PROCESS_ID is 'x': it must be a number"),
        ({"JAX_PROCESS_ID": "4"}, "this is process 4 of 4, but processes count from 0"),
        ({"JAX_NUM_PROCESSES": "1"}, "this is process 3 of 1, but processes count from 0"),
        ({"JAX_NUM_PROCESSES": "0", "JAX_PROCESS_ID": "0"}, "this is process 0 of 0"),
        ({"JAX_COORDINATOR_ADDRESS": "tpu-0"}, "it must be host:port"),
        ({"JAX_COORDINATOR_ADDRESS": ":8476"}, "it must be host:port"),
        ({"JAX_COORDINATOR_ADDRESS": "tpu..0:8476"}, "it must be host:port"),
        ({"JAX_COORDINATOR_ADDRESS": f"{'a' * 64}:8476"}, "it must be host:port"),
        ({"JAX_COORDINATOR_ADDRESS": "tpu-0:84760"}, "it must be host:port"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        find_cluster({**JAX, **changes})


def test_several_slices_are_refused() -> None:
    with pytest.raises(UserError, match="several TPU slices"):
        find_cluster({**JAX, "MEGASCALE_NUM_SLICES": "2"})
