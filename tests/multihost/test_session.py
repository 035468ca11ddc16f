"""Completions of several turns are the same on one host and on two."""

from pathlib import Path

import numpy as np
import pytest


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize("slots", [0, 8])
def test_hosts_leave_dialogues_unchanged(pod, tmp_path: Path, slots: int) -> None:
    """Though replies come in another order."""
    made = {}
    for num_processes in (1, 2):
        devices = [4 // num_processes] * num_processes
        for index, outcome in pod.run("session_worker.py", devices, tmp_path, slots).items():
            assert outcome.code == 0, outcome.output
            made[num_processes, index] = np.load(tmp_path / f"turns-{num_processes}-{index}.npz")
    whole = made.pop((1, 0))
    assert any(not whole[name].all() for name in whole if name.startswith("written"))
    for half in made.values():
        assert set(half) == set(whole)
        for name, value in whole.items():
            np.testing.assert_allclose(half[name], value, rtol=0, atol=1e-5, err_msg=name)
