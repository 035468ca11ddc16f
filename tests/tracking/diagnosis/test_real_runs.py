"""The doctor names the sickness of six runs made sick, and is silent on six healthy ones."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_eqx.tracking.diagnosis import Finding, diagnose
from grpo_eqx.tracking.recorded_run import RecordedRun

from .real_runs import HEALTHY, SICK

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the runs, made on one device in a process of its own."""
    folder = tmp_path_factory.mktemp("runs")
    environment = {
        **os.environ,
        "XLA_FLAGS": "",  # here steps take longer than compilation
        "JAX_ENABLE_COMPILATION_CACHE": "true",
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    script = Path(__file__).with_name("real_runs.py")
    done = subprocess.run(
        [sys.executable, str(script), str(folder)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


def sicknesses(run: Path) -> list[Finding]:
    recorded = RecordedRun.read(run)
    found = diagnose(recorded.settings, recorded.steps, recorded.evaluations)
    return [finding for finding in found if finding.kind == "sickness"]


@pytest.mark.parametrize("name", SICK)
def test_a_sick_run_is_told_what_it_has(runs: Path, name: str) -> None:
    found = {finding.rule for finding in sicknesses(runs / name)}
    assert found >= SICK[name].rules


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_said_about_a_healthy_run(runs: Path, name: str) -> None:
    assert sicknesses(runs / name) == []
