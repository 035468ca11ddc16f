"""Pods on one machine: processes with CPU devices of their own, each running a worker script."""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from grpo_eqx.distributed.cluster import COORDINATOR, NUM_PROCESSES, PROCESS_ID

FOLDER = Path(__file__).parent


class Outcome(NamedTuple):
    """What a process ended with."""

    code: int
    output: str


class Pod:
    """Starts the workers of a pod."""

    def __init__(self, folder: Path):
        self.folder = folder

    def run(
        self,
        script: str,
        devices: Sequence[int],
        *arguments: object,
        absent: Sequence[int] = (),
        own_arguments: Mapping[int, Sequence[str]] = {},
        own_environment: Mapping[int, Mapping[str, str]] = {},
    ) -> dict[int, Outcome]:
        """Runs a script of this folder as a process with so many devices for each number.

        **Arguments:** the processes that are not started; what some of them are told besides, by
        arguments and by the environment.
        """
        port = free_port()
        started = [i for i in range(len(devices)) if i not in absent]
        logs = {i: self.folder / f"{i}.log" for i in started}
        workers = {}
        for i in started:
            environment = os.environ | {
                COORDINATOR: f"localhost:{port}",
                NUM_PROCESSES: str(len(devices)),
                PROCESS_ID: str(i),
                "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} "
                f"--xla_force_host_platform_device_count={devices[i]}",
                **own_environment.get(i, {}),
            }
            told = [*map(str, arguments), *own_arguments.get(i, ())]
            command = [sys.executable, "-W", "ignore", str(FOLDER / script), *told]
            with logs[i].open("w") as log:
                workers[i] = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            codes = {i: worker.wait(timeout=900) for i, worker in workers.items()}
        finally:
            for worker in workers.values():
                worker.kill()
                worker.wait()
        return {i: Outcome(codes[i], logs[i].read_text()) for i in started}


@pytest.fixture(scope="session")
def pod(tmp_path_factory: pytest.TempPathFactory) -> Pod:
    return Pod(tmp_path_factory.mktemp("pod"))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])
