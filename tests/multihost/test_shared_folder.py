"""Hosts that write a checkpoint together see each other's files, or say so."""

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow


def test_a_folder_that_all_see_is_shared(pod: Any, tmp_path: Path) -> None:
    for outcome in pod.run("shared_folder_worker.py", [1] * 2, tmp_path / "run").values():
        assert "shared" in outcome.output.splitlines(), outcome.output
    assert list((tmp_path / "run").iterdir()) == []


def test_folders_of_their_own_are_refused_on_all_hosts(pod: Any, tmp_path: Path) -> None:
    own = {index: [str(tmp_path / str(index))] for index in range(2)}
    outcomes = pod.run("shared_folder_worker.py", [1] * 2, own_arguments=own)
    assert "error: process 1 failed: UserError: output_dir" in outcomes[0].output
    assert "checkpoints need storage that all hosts share" in outcomes[1].output
