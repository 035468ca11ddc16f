"""Completions of a server are the same on one host and on two, whose first asks for them."""

from pathlib import Path

import numpy as np
import pytest

from tests.generation.remote.fake_engines import FakeEngine, random_tokens, running


@pytest.mark.slow
def test_all_hosts_get_what_the_first_asks_for(pod, tmp_path: Path) -> None:
    made = {}
    for num_processes in (1, 2):
        devices = [4 // num_processes] * num_processes
        with running(FakeEngine("vllm", random_tokens(29, 3))) as engine:
            address = engine.address
            outcomes = pod.run("remote_sampler_worker.py", devices, tmp_path, address)
            num_asked = len(engine.bodies)
        for index, outcome in outcomes.items():
            assert outcome.code == 0, outcome.output
            made[num_processes, index] = np.load(tmp_path / f"remote-{num_processes}-{index}.npz")
        assert len(engine.folders) == 1
        assert num_asked > 2 * 16
    whole = made.pop((1, 0))
    assert any(not whole[name].all() for name in whole if name.startswith("written"))
    for half in made.values():
        assert set(half) == set(whole)
        for name, value in whole.items():
            np.testing.assert_array_equal(half[name], value, err_msg=name)
