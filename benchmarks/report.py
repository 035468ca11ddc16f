"""Seconds and bytes that a report takes, of one run and of three, each of 1,000 steps.

python benchmarks/report.py

The runs are made up: their folders have the metrics and the tables of completions that runs of this
length have. A report is to take less than 10 s, and 3 MB.
"""

import importlib.util
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPEATS = 3
STEPS = 1000
SYNTHETIC = Path(__file__).parents[1] / "tests" / "tracking" / "report" / "synthetic_run.py"


def main() -> None:
    spec = importlib.util.spec_from_file_location("synthetic_run", SYNTHETIC)
    assert spec is not None
    assert spec.loader is not None
    synthetic = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(synthetic)
    with tempfile.TemporaryDirectory() as folder:
        runs = [
            synthetic.write_run(Path(folder, f"seed{seed}"), steps=STEPS, seed=seed)
            for seed in (0, 1)
        ]
        runs.append(synthetic.write_run(Path(folder, "other"), steps=STEPS, learning_rate=1e-3))
        for chosen in (runs[:1], runs):
            report(chosen, Path(folder, "report.html"))


def report(runs: list[Path], output: Path) -> None:
    """Times the command, the start of Python included."""
    command = [sys.executable, "-m", "grpo_eqx", "report", *map(str, runs), "--output", str(output)]
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        seconds.append(time.perf_counter() - start)
    count = len(list(output.with_name("report_plots").iterdir()))
    print(
        f"{len(runs)} x {STEPS:,} steps: {statistics.median(seconds):.1f} s (median of {REPEATS}), "
        f"{output.stat().st_size / 1e6:.2f} MB, {count} plots"
    )


if __name__ == "__main__":
    main()
