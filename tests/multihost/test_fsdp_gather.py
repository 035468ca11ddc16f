"""A sharded array takes its share of each device, a gathered one all of its bytes, to the byte."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "fsdp_gather.py"


def check(figures: dict[str, Any], target_gib: float, divisor: int) -> None:
    total = figures["total_bytes"]
    assert total == pytest.approx(target_gib * 2**30, rel=1e-2)
    assert (figures["hosts"], figures["devices"]) == (4, 16)
    for name in ("local_max", "local_min", "max"):
        assert figures[f"per_device_array_bytes_{name}"] * divisor == total
    assert figures["host_array_bytes_max"] * divisor == 4 * total
    kinds = [kind for kind, *_ in figures.get("collectives", ())]
    assert kinds == ["all-gather"] * (divisor == 1)


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "mode", "divisor"), [("auto", "gather", 1), ("host_local", "sharded", 4)]
)
def test_on_a_simulated_pod(pod: Any, tmp_path: Path, mesh: str, mode: str, divisor: int) -> None:
    out = tmp_path / "figures.json"
    flags = ["--mesh-shape", mesh, "--mode", mode, "--target-bytes-gib", 2**-6, "--json", out]
    outcomes = pod.run(str(SCRIPT), [4] * 4, *flags, "--require-processes", 4)
    for outcome in outcomes.values():
        assert outcome.code == 0, outcome.output
    check(json.loads(out.read_text()), 2**-6, divisor)
    printed = [o.output.count("per_device_array_bytes_local_max=") for o in outcomes.values()]
    assert printed == [1, 0, 0, 0]


@pytest.mark.grid
@pytest.mark.topology
@pytest.mark.parametrize(
    ("mesh", "mode", "divisor"),
    [
        ("auto", "gather", 1),
        ("host_local", "sharded", 4),
        pytest.param("auto", "sharded", 16, marks=pytest.mark.long),
        pytest.param("host_local", "gather", 1, marks=pytest.mark.long),
    ],
)
def test_compiled_for_a_pod(tmp_path: Path, mesh: str, mode: str, divisor: int) -> None:
    pytest.importorskip("libtpu", reason="needs the plan extra")
    out = tmp_path / "figures.json"
    flags = ["--mesh-shape", mesh, "--mode", mode, "--topology", "v6e-16", "--json", str(out)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, str(SCRIPT), *flags], env=environment, check=True)
    check(json.loads(out.read_text()), 5.6, divisor)
