"""Rows, counters, failures and facts between processes, and the same for a process alone."""

import pytest


@pytest.mark.slow
def test_processes_exchange_exactly(pod, monkeypatch: pytest.MonkeyPatch) -> None:
    of_slurm = {"JOB_ID": 1, "STEP_NODELIST": "a[1-4]", "NTASKS": 4, "PROCID": 0, "LOCALID": 0}
    for name, value in {**of_slurm, "STEP_NUM_NODES": 4}.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    for outcome in pod.run("exchange_worker.py", [4] * 4).values():
        assert outcome.code == 0, outcome.output
