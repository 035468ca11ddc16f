"""Rows, counters, failures and facts between processes, and the same for a process alone."""

import pytest


@pytest.mark.slow
def test_processes_exchange_exactly(pod) -> None:
    for outcome in pod.run("exchange_worker.py", [4] * 4).values():
        assert outcome.code == 0, outcome.output
