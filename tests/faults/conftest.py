"""Runs in processes of their own, to be killed."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

FAULTY_RUN = Path(__file__).with_name("faulty_run.py")
EXAMPLE = Path(__file__).parents[2] / "examples" / "gsm8k.py"
PROBLEMS = Path(__file__).parents[1] / "problems.jsonl"
OF_THE_MACHINE = ("time/", "throughput/", "memory/", "perf/", "compile/", "step_time")
FLAGS = {
    "data": PROBLEMS, "steps": 8, "prompts_per_step": 8, "num_generations": 4, "save_steps": 1,
    "max_completion_length": 8, "eval_problems": 48, "log_completions_steps": 1,
    "learning_rate": 1e-3, "entropy_coef": 0.1,  # learns something, though no answer is right
}  # fmt: skip


class Command:
    """`grpo-eqx train`, or a script with its flags, with a small model, in a folder."""

    def __init__(
        self,
        model: Path,
        cache: Path,
        folder: Path,
        *,
        processes: int = 1,
        devices: int | None = None,
        script: Path | None = None,
        fault: str | None = None,
        **flags: Any,
    ):
        """**Arguments:** the model; the cache of compiled programs; the folder of the run; the
        number of processes, and of devices of each; the script; what `faulty_run.py`, which it
        then is, does; other flags.
        """
        script = FAULTY_RUN if fault is not None else script
        self.folder = folder
        named = {**FLAGS, "model": model, "output_dir": folder, **flags}
        python = [sys.executable, "-W", "ignore"]
        command = [*python, "-m", "grpo_eqx.cli.main"]
        self.arguments = [*command, "train"] if script is None else [*python, str(script)]
        if processes > 1:
            pod = ["--processes", str(processes), "--devices-per-process", str(devices or 1)]
            self.arguments = [*command, "launch", "local", *pod, "--", *self.arguments]
        for name, value in named.items():
            flag = f"--{name.replace('_', '-')}"
            self.arguments += [flag] if value is True else [flag, str(value)]
        xla_flags = [x for x in os.environ["XLA_FLAGS"].split() if "device_count" not in x]
        xla_flags.append(f"--xla_force_host_platform_device_count={devices or 1}")
        self.environment = os.environ | {
            "XLA_FLAGS": " ".join(xla_flags),
            "JAX_ENABLE_COMPILATION_CACHE": "true",
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "FAULT": fault or "",
        }

    def start(self) -> subprocess.Popen[str]:
        """Starts the command; its output can be read line by line."""
        return subprocess.Popen(
            self.arguments, env=self.environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def start_hosts(
        self, *own_flags: Sequence[str], number: int, folders: Sequence[Path | None] = ()
    ) -> list[subprocess.Popen[str]]:
        """Starts the command on hosts of its own, as a scheduler does.

        **Arguments:** what each host is told besides; how many hosts there should be, of which
        only those are started; the folder that each is started in, by default this process's.
        """
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            address = f"localhost:{probe.getsockname()[1]}"
        pod = ["--coordinator-address", address, "--num-processes", str(number), "--process-id"]
        return [
            subprocess.Popen(
                [*self.arguments, *pod, str(index), *own], env=self.environment, text=True,
                cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )
            for index, (own, folder) in enumerate(zip_longest(own_flags, folders))
        ]  # fmt: skip

    def finish(self, code: int = 0) -> str:
        """Runs the command to its end, which has the exit code; returns what it printed."""
        process = self.start()
        output, _ = process.communicate(timeout=600)
        assert process.returncode == code, output
        return output

    def kill(self, process: subprocess.Popen[str]) -> None:
        """Kills the run, on all of its hosts at once."""
        listed = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True)
        for pid in map(int, listed.stdout.split()) if "local" in self.arguments else [process.pid]:
            os.kill(pid, signal.SIGKILL)
        process.communicate()

    def rows(self) -> list[dict[str, float]]:
        """The metrics of every step and evaluation that is recorded, times aside."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [
            {name: x for name, x in json.loads(line).items() if not name.startswith(OF_THE_MACHINE)}
            for line in lines
            if line.endswith("\n")
        ]

    def tables(self) -> dict[str, bytes]:
        """The completions of every step, as files."""
        return {path.name: path.read_bytes() for path in (self.folder / "completions").iterdir()}

    def samples(self, table: str) -> list[tuple[str, str]]:
        """The prompts and completions of a step, by the name of its table."""
        rows = pq.read_table(self.folder / "completions" / table).to_pylist()
        return [(row["prompt"], row["completion"]) for row in rows]

    def model(self) -> bytes:
        """The trained weights, as a file."""
        return (self.folder / "model" / "model.safetensors").read_bytes()


def wait_for_step(command: Command, process: subprocess.Popen[str], step: int) -> None:
    """Waits until a process has recorded a step, or ended."""
    deadline = time.monotonic() + 300
    while sum("reward" in row for row in command.rows()) < step and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Cache of compiled programs, so that a process that starts again is soon at work."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # for all workers
    folder = base / "programs"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def unbroken(
    small_model: Path, programs: Path, tmp_path_factory: pytest.TempPathFactory
) -> Command:
    """A run that nothing happened to, of an epoch and a half."""
    command = Command(small_model, programs, tmp_path_factory.mktemp("unbroken") / "run")
    command.finish()
    return command


@pytest.fixture
def command(small_model: Path, programs: Path, tmp_path: Path) -> Command:
    """The same run, in a folder of its own."""
    return Command(small_model, programs, tmp_path / "run")
