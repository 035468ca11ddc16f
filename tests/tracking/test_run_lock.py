"""Two runs never write to one folder, and a run that is gone holds none."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from grpo_eqx.errors import UserError
from grpo_eqx.tracking.run_lock import RunLock

HOLDS = """
import sys
from pathlib import Path
from grpo_eqx.tracking.run_lock import RunLock
with RunLock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path) -> subprocess.Popen[str]:
    """Another process, which holds the lock of the folder until its input ends."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", HOLDS, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_while_one_run_has_it_others_are_told_which(
    holder: subprocess.Popen[str], tmp_path: Path
) -> None:
    message = rf"is in use by a run on {socket.gethostname()} \(process {holder.pid}, started 20"
    with pytest.raises(UserError, match=message):
        RunLock(tmp_path).check_free()
    with pytest.raises(UserError, match=message), RunLock(tmp_path):
        pass
    holder.communicate()
    with RunLock(tmp_path) as lock:
        assert json.loads(lock.path.read_text())["process"] == os.getpid()


def test_a_run_that_was_killed_holds_nothing(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    holder.kill()
    holder.communicate()
    assert json.loads((tmp_path / ".lock").read_text())["process"] == holder.pid
    RunLock(tmp_path).check_free()
    with RunLock(tmp_path):
        pass


@pytest.mark.parametrize("age", [60, 600])
def test_a_run_on_another_host_gives_signs_of_life(tmp_path: Path, age: float) -> None:
    path = tmp_path / ".lock"
    path.write_text(json.dumps({"host": "elsewhere", "process": 7, "started": "2026-01-02 03:04"}))
    os.utime(path, (time.time() - age,) * 2)
    if age < 120:
        with pytest.raises(UserError, match="a run on elsewhere"), RunLock(tmp_path):
            pass
    else:
        with RunLock(tmp_path):
            pass


def test_it_can_be_taken_again_and_checking_creates_nothing(tmp_path: Path) -> None:
    lock = RunLock(tmp_path / "new")
    lock.check_free()
    assert not lock.path.parent.exists()
    for _ in range(2):
        with lock:
            assert lock.path.exists()
        assert lock.path.read_text() == ""
