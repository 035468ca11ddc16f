"""An update over several processes is the update of one."""

from pathlib import Path

import numpy as np
import pytest


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize("trained", ["all", "adapters"])
def test_hosts_leave_the_update_unchanged(pod, tmp_path: Path, trained: str) -> None:
    made = {}
    for num_processes in (1, 2):
        devices = [8 // num_processes] * num_processes
        for index, outcome in pod.run("update_worker.py", devices, tmp_path, trained).items():
            assert outcome.code == 0, outcome.output
            made[num_processes, index] = np.load(tmp_path / f"update-{num_processes}-{index}.npz")
    whole = made.pop((1, 0))
    assert whole["metric grad_norm"] > 0
    for half in made.values():
        assert set(half) == set(whole)
        for name, value in whole.items():
            size = np.abs(value).max()
            np.testing.assert_allclose(half[name], value, rtol=1e-4, atol=4e-6 * size, err_msg=name)
