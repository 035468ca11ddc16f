"""The doctor names the sickness of runs made sick, and is silent on healthy ones."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_eqx.tracking.diagnosis import diagnose
from grpo_eqx.tracking.recorded_run import RecordedRun

from .real_runs import HEALTHY, SICK

pytestmark = pytest.mark.slow


def sicknesses(folder: Path) -> set[str]:
    """Makes a run, on one device in a process of its own; returns what the doctor says it has."""
    flags = [x for x in os.environ["XLA_FLAGS"].split() if "device_count" not in x]
    environment = {
        **os.environ,
        "XLA_FLAGS": " ".join(flags),
        "JAX_ENABLE_COMPILATION_CACHE": "true",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    script = Path(__file__).with_name("real_runs.py")
    done = subprocess.run(
        [sys.executable, str(script), str(folder)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    recorded = RecordedRun.read(folder)
    found = diagnose(
        recorded.settings,
        recorded.steps,
        recorded.evaluations,
        num_devices=recorded.num_devices,
    )
    return {finding.rule for finding in found if finding.kind == "sickness"}


@pytest.mark.grid
@pytest.mark.parametrize("name", SICK)
def test_sick_runs_are_told_what_they_have(name: str, tmp_path: Path) -> None:
    assert sicknesses(tmp_path / name) >= SICK[name].rules


@pytest.mark.grid
@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_runs_are_told_nothing(name: str, tmp_path: Path) -> None:
    assert not sicknesses(tmp_path / name)
