"""Simulated pod: several processes on this machine, each with its own CPU devices."""

import dataclasses
import os
import secrets
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from grpo_eqx.common.clean_text import print_clean
from grpo_eqx.common.errors import EXIT_DOES_NOT_FIT, EXIT_USER_ERROR
from grpo_eqx.distributed.cluster import COORDINATOR, JOB, NUM_PROCESSES, PROCESS_ID
from grpo_eqx.launch.processes import Outcome, Process, run_together
from grpo_eqx.launch.subcommand import Subcommand, check_at_least

_FINAL = (0, EXIT_USER_ERROR, EXIT_DOES_NOT_FIT)
"""Exit codes after which another start would end the same way."""
_DEVICE_COUNT = "--xla_force_host_platform_device_count"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Local(Subcommand):
    """Run COMMAND as every process of a simulated pod on this machine.

    grpo-eqx launch local [flags] -- COMMAND

    Every process is told of the others and sees its own CPU devices. Lines of output are prefixed
    with the number of the process. If one fails, all are ended, and this command exits with its
    exit code, unless it may start them again.
    """

    takes_command: ClassVar[bool] = True
    processes: int = 4
    """Number of processes to start: the hosts of the pod."""
    devices_per_process: int = 4
    """Number of CPU devices per process: the chips of a host."""

    restarts: int = 0
    """Number of times to start all processes again after one failed or was asked to stop. What the
    input makes impossible is not tried again."""

    def run(self, command: tuple[str, ...]) -> int:
        check_at_least("processes", self.processes, 1)
        check_at_least("devices-per-process", self.devices_per_process, 1)
        check_at_least("restarts", self.restarts, 0)
        for restart in range(1, self.restarts + 1):
            code, told = self._run_once(command)
            if told or code in _FINAL:
                return code
            print_clean(
                f"exit code {code}: starting all processes again ({restart} of {self.restarts})",
                file=sys.stderr,
            )
        return self._run_once(command).code

    def _run_once(self, command: tuple[str, ...]) -> Outcome:
        with _reserved_port() as port:
            job = secrets.token_hex(8)
            return run_together(
                [
                    Process(str(index), command, self._environment(index, port, job))
                    for index in range(self.processes)
                ]
            )

    def _environment(self, index: int, port: int, job: str) -> dict[str, str]:
        flags = os.environ.get("XLA_FLAGS", "").split()
        kept = [flag for flag in flags if flag.partition("=")[0] != _DEVICE_COUNT]
        return {
            **os.environ,
            COORDINATOR: f"localhost:{port}",
            NUM_PROCESSES: str(self.processes),
            PROCESS_ID: str(index),
            JOB: job,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": " ".join([*kept, f"{_DEVICE_COUNT}={self.devices_per_process}"]),
            "PYTHONUNBUFFERED": "1",  # lines as they come, despite the pipe
        }


@contextmanager
def _reserved_port() -> Iterator[int]:
    """Yields a free port of all addresses, which no other program is given meanwhile."""
    both = socket.has_dualstack_ipv6()
    with socket.socket(socket.AF_INET6 if both else socket.AF_INET) as reserved:
        if both:
            reserved.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        reserved.bind(("", 0))
        # Process 0 can still listen on it, as this socket does not. Elsewhere it could not.
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port = int(reserved.getsockname()[1])
        if sys.platform != "linux":
            reserved.close()
        yield port
