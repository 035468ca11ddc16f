"""Two runs never write to one folder, and a run that is gone holds none."""

import fcntl
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from grpo_eqx.common.errors import RunError, UserError
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


@pytest.mark.parametrize("alive", [True, False])
def test_a_run_on_another_host_gives_signs_of_life(
    tmp_path: Path, alive: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / ".lock"
    path.write_text(json.dumps({"host": "elsewhere", "process": 7, "started": "2026-01-02 03:04"}))
    monkeypatch.setattr(time, "sleep", lambda seconds: os.utime(path, (5, 5)) if alive else None)
    if alive:
        with pytest.raises(RunError, match="in use by a run on elsewhere"), RunLock(tmp_path):
            pass
    else:
        with RunLock(tmp_path):
            pass
    assert "for signs of the run on elsewhere" in capsys.readouterr().err


def test_a_child_that_lives_on_holds_nothing(tmp_path: Path) -> None:
    with RunLock(tmp_path) as lock:
        assert lock._file is not None
        child = subprocess.Popen(["sleep", "60"], pass_fds=[lock._file.fileno()])
    try:
        with RunLock(tmp_path):
            pass
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize("content", ["", "[1]", "{", "{}"])
def test_a_file_of_something_else_is_no_lock(tmp_path: Path, content: str) -> None:
    (tmp_path / ".lock").write_text(content)
    if content == "{}":
        (tmp_path / ".lock").write_text(json.dumps({"host": socket.gethostname()}))
    with RunLock(tmp_path):
        pass


def test_it_can_be_taken_again_and_checking_creates_nothing(tmp_path: Path) -> None:
    lock = RunLock(tmp_path / "new")
    lock.check_free()
    assert not lock.path.parent.exists()
    for _ in range(2):
        with lock:
            assert lock.path.exists()
            (lock.path.parent / "metrics.jsonl").touch()
        assert lock.path.read_text() == ""


def test_a_lock_whose_file_was_removed_meanwhile_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its run removes it between the opening and the locking by another."""
    lock = RunLock(tmp_path)
    flock = fcntl.flock

    def removed_first(*arguments: int) -> None:
        lock.path.unlink(missing_ok=True)
        flock(*arguments)

    monkeypatch.setattr("fcntl.flock", removed_first)
    with pytest.raises(UserError, match="is in use by another run"), lock:
        pass


def test_a_run_that_wrote_nothing_leaves_no_folder(tmp_path: Path) -> None:
    lock = RunLock(tmp_path / "new")
    for _ in range(2):
        with lock:
            assert lock.path.exists()
        assert list(tmp_path.iterdir()) == []
