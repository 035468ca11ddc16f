"""The doctor names the sickness of seven runs made sick, and is silent on six healthy ones."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_eqx.tracking.diagnosis import diagnose
from grpo_eqx.tracking.recorded_run import RecordedRun

from .real_runs import HEALTHY, SICK

pytestmark = pytest.mark.slow


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Folder of the runs, made on one device in a process of its own."""
    environment = {
        **os.environ,
        "XLA_FLAGS": "",  # here steps take longer than compilation
        "JAX_ENABLE_COMPILATION_CACHE": "true",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled"),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    script = Path(__file__).with_name("real_runs.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return tmp_path


def sicknesses(run: Path) -> set[str]:
    recorded = RecordedRun.read(run)
    found = diagnose(
        recorded.settings,
        recorded.steps,
        recorded.evaluations,
        num_devices=recorded.num_devices,
    )
    return {finding.rule for finding in found if finding.kind == "sickness"}


def test_sick_runs_are_told_what_they_have_and_healthy_ones_nothing(runs: Path) -> None:
    """One test, so that one process makes the runs."""
    missed = {name: SICK[name].rules - sicknesses(runs / name) for name in SICK}
    assert not any(missed.values()), missed
    alarms = {name: sicknesses(runs / name) for name in HEALTHY}
    assert not any(alarms.values()), alarms
