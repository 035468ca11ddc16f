"""A run that is killed at random steps is the unbroken run: bit for bit, or on another mesh."""

import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from .conftest import EXAMPLE, Command, wait_for_step

pytestmark = pytest.mark.slow

EVERYTHING: dict[str, Any] = {
    "steps": 12, "recipe": "dapo", "num_iterations": 2, "beta": 0.05, "sync_ref_model": True,
    "ref_model_sync_steps": 3, "prompts_per_step": 16, "wandb": "offline",
}  # fmt: skip
"""Dynamic sampling, several updates, a reference that moves, a tracker; epochs of 5.5 steps."""


@pytest.mark.long
@pytest.mark.parametrize("processes", [1, 2])
def test_killed_three_times_it_is_the_unbroken_run(
    small_model: Path, programs: Path, tmp_path: Path, processes: int
) -> None:
    flags = {**EVERYTHING, "processes": processes, "script": EXAMPLE}
    whole = Command(small_model, programs, tmp_path / "whole", **flags)
    accuracy = re.findall("accuracy .*", whole.finish())
    assert len(accuracy) == 2  # before and after
    parts = Command(small_model, programs, tmp_path / "parts", **flags)
    for step in sorted(random.Random(processes).sample(range(1, 12), 3)):
        process = parts.start()
        wait_for_step(parts, process, step)
        parts.kill(process)
    assert re.findall("accuracy .*", parts.finish()) == accuracy
    steps = [row["step"] for row in parts.rows() if "reward" in row]  # else an evaluation
    assert steps == list(range(1, 13))
    assert parts.rows() == whole.rows()
    assert parts.tables() == whole.tables()
    assert parts.model() == whole.model()
    assert (parts.folder / "run_id").read_text() != (whole.folder / "run_id").read_text()


@pytest.fixture(scope="module")
def stopped(small_model: Path, programs: Path, tmp_path_factory: pytest.TempPathFactory) -> Command:
    """A run on one device, killed after its third step."""
    command = Command(small_model, programs, tmp_path_factory.mktemp("stopped") / "run")
    process = command.start()
    wait_for_step(command, process, 3)
    command.kill(process)
    return command


@pytest.mark.grid
@pytest.mark.parametrize(("processes", "devices", "mesh"), [(1, 8, "auto"), (2, 2, "host_local")])
def test_on_another_mesh_it_has_the_same_prompts_and_samples(
    small_model: Path, programs: Path, tmp_path: Path, stopped: Command, unbroken: Command,
    processes: int, devices: int, mesh: str,
) -> None:  # fmt: skip
    shutil.copytree(stopped.folder, tmp_path / "run")
    flags = {"processes": processes, "devices": devices, "mesh": mesh}
    moved = Command(small_model, programs, tmp_path / "run", **flags)
    assert "resuming from" in moved.finish()
    for name in unbroken.tables():
        assert moved.samples(name) == unbroken.samples(name)
    for found, expected in zip(moved.rows(), unbroken.rows(), strict=True):
        for name, value in expected.items():
            assert found[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
