"""An update over several processes is the update of one."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from grpo_eqx.sharding.cluster import COORDINATOR, NUM_PROCESSES, PROCESS_ID

WORKER = Path(__file__).with_name("update_worker.py")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def start_worker(num_processes: int, index: int, port: int, out: Path) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        COORDINATOR: f"localhost:{port}",
        NUM_PROCESSES: str(num_processes),
        PROCESS_ID: str(index),
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={8 // num_processes}",
    }
    command = [sys.executable, str(WORKER), str(out)]
    with out.with_suffix(".log").open("w") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def update_over(num_processes: int, folder: Path) -> list[dict[str, np.ndarray]]:
    """What every process made of the same batch."""
    port = free_port()
    outs = [folder / f"{num_processes}-{index}.npz" for index in range(num_processes)]
    workers = [start_worker(num_processes, i, port, out) for i, out in enumerate(outs)]
    try:
        for worker, out in zip(workers, outs, strict=True):
            assert worker.wait(timeout=300) == 0, out.with_suffix(".log").read_text()
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    return [dict(np.load(out)) for out in outs]


@pytest.mark.slow
def test_hosts_leave_the_update_unchanged(tmp_path: Path) -> None:
    (whole,) = update_over(1, tmp_path)
    halves = update_over(2, tmp_path)
    assert whole["metric grad_norm"] > 0
    for half in halves:
        assert half.keys() == whole.keys()
        for name, value in whole.items():
            size = np.abs(value).max()
            np.testing.assert_allclose(half[name], value, rtol=1e-4, atol=4e-6 * size, err_msg=name)
