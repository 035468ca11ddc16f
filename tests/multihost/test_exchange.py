"""Rows, counters, failures and facts between processes, and the same for a process alone."""

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_processes_exchange_exactly(pod, processes: int) -> None:
    for outcome in pod.run("exchange_worker.py", [4] * processes).values():
        assert outcome.code == 0, outcome.output
