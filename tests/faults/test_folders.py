"""Runs that start at once keep out of each other's folders."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .conftest import Command, wait_for_step

pytestmark = [pytest.mark.slow, pytest.mark.grid("folders")]


@pytest.fixture
def start(
    small_model: Path, programs: Path, tmp_path: Path
) -> Callable[..., subprocess.Popen[str]]:
    """Starts a run in the default folder of its settings."""

    def run(**flags: Any) -> subprocess.Popen[str]:
        command = Command(small_model, programs, tmp_path / "unused", **flags)
        index = command.arguments.index("--output-dir")
        arguments = command.arguments[:index] + command.arguments[index + 2 :]
        return subprocess.Popen(
            arguments, cwd=tmp_path, env=command.environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    return run


def test_of_two_equal_runs_one_trains_and_one_is_refused(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    runs = [start(), start()]
    outputs = [run.communicate(timeout=300)[0] for run in runs]
    (winner,) = [i for i, run in enumerate(runs) if run.returncode == 0]
    refused = outputs[1 - winner]
    assert runs[1 - winner].returncode == 2, refused
    assert "is in use by a run on " in refused
    assert f"(process {runs[winner].pid}, started 20" in refused
    assert len(list((tmp_path / "runs").iterdir())) == 1


@pytest.mark.long
def test_a_sweep_in_parallel_has_a_folder_for_each(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    runs = [start(learning_rate=rate) for rate in (1e-4, 3e-4, 1e-3)]
    outputs = [run.communicate(timeout=300)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0, 0], outputs
    folders = list((tmp_path / "runs").iterdir())
    assert len(folders) == 3
    assert all((folder / "model").is_dir() for folder in folders)


def test_a_second_run_is_refused_while_the_first_trains(
    small_model: Path, programs: Path, tmp_path: Path
) -> None:
    endless = Command(small_model, programs, tmp_path / "run", steps=100_000)
    first = endless.start()
    wait_for_step(endless, first, 1)
    refused = Command(small_model, programs, endless.folder, learning_rate=2e-3).finish(2)
    assert f"(process {first.pid}, started 20" in refused
    endless.kill(first)
    again = endless.start()
    assert again.stdout is not None
    assert any("resuming from" in line for line in again.stdout)
    endless.kill(again)
