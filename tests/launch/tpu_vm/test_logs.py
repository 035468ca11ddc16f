"""Logs of a run."""

import os
import pty
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

Launch = Callable[..., Any]
ADDRESS = ("--name", "my-vm", "--zone", "us-central2-b", "--type", "v4-16")


@pytest.fixture(autouse=True)
def finished(launch: Launch, cloud: Any) -> None:
    """A run that printed 30 lines on each worker."""
    cloud.set_up()
    launch("tpu-vm", "run", *ADDRESS, "--run-name", "first", "--", "seq", "30")
    cloud.wait_for("first")


def test_the_last_lines_of_all_workers(launch: Launch) -> None:
    done = launch("tpu-vm", "logs", *ADDRESS, "--lines", "2")
    assert (done.code, done.out) == (0, "[0] 29\n[0] 30\n[1] 29\n[1] 30\n")


def test_of_one_worker_and_one_run(launch: Launch) -> None:
    done = launch(
        "tpu-vm", "logs", *ADDRESS, "--worker", "1", "--lines", "1", "--run-name", "first"
    )
    assert (done.code, done.out) == (0, "[1] 30\n")


def test_following_ends_with_the_run(launch: Launch) -> None:
    done = launch("tpu-vm", "logs", *ADDRESS, "--follow", "--lines", "1")
    assert done.code == 0
    assert {"[0] 30", "[1] 30"} == set(done.out.splitlines())


def test_following_shows_what_comes(launch: Launch, cloud: Any) -> None:
    # It goes on only once somebody reads the log.
    wait = 'while ! pgrep -f "tail -n 3 --pid=$PPID" >/dev/null; do :; done; echo new'
    launch("tpu-vm", "run", *ADDRESS, "--run-name", "live", "--", "bash", "-c", wait)
    done = launch("tpu-vm", "logs", *ADDRESS, "--follow", "--lines", "3")
    assert done.code == 0
    assert {"[0] new", "[1] new"} == set(done.out.splitlines())


def test_a_worker_without_a_log_is_named_after_the_others(launch: Launch, cloud: Any) -> None:
    (cloud.pod_folder(0) / "runs/latest").unlink()
    done = launch("tpu-vm", "logs", *ADDRESS, "--lines", "1")
    assert (done.code, done.out) == (1, "[1] 30\n")
    assert "worker 0 (203.0.113.0), exit code 3" in done.err
    assert "there is no log" in done.err


def test_lines_arrive_as_they_are_with_and_without_following(launch: Launch, cloud: Any) -> None:
    script = r"printf 'a\tb\302\240\033[1m 10%%\r20%%\342\200\250\377\n\nc'"
    launch("tpu-vm", "run", *ADDRESS, "--run-name", "odd", "--", "bash", "-c", script)
    cloud.wait_for("odd")
    logs = [sys.executable, "-m", "grpo_eqx", "launch", "tpu-vm", "logs", *ADDRESS]
    shown = [
        subprocess.run([*logs, "--worker", "0", *flags], stdout=subprocess.PIPE, check=True).stdout
        for flags in ([], ["--follow"])
    ]
    assert shown[0] == b"[0] a\tb\xc2\xa0\x1b[1m 10%\r20%\xe2\x80\xa8\xff\n[0] \n[0] c\n"
    assert shown[1] == shown[0]


def test_lines_steer_no_terminal(launch: Launch, cloud: Any) -> None:
    launch("tpu-vm", "run", *ADDRESS, "--run-name", "odd", "--", "printf", r"\033[2Ja\n")
    cloud.wait_for("odd")
    ours, theirs = pty.openpty()
    logs = [sys.executable, "-m", "grpo_eqx", "launch", "tpu-vm", "logs", *ADDRESS]
    subprocess.run([*logs, "--worker", "0"], stdout=theirs, check=True)
    os.close(theirs)
    assert os.read(ours, 4096) == rb"[0] \x1b[2Ja" + b"\r\n"
    os.close(ours)


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (("--worker", "2"), "--worker is 2: it must be from 0 to 1"),
        (("--worker=-1",), "--worker is -1"),
        (("--lines=-1",), "--lines is -1"),
        (("--run-name", "../.."), "--run-name is"),
    ],
)
def test_what_cannot_be_is_refused(launch: Launch, flags: tuple[str, ...], error: str) -> None:
    done = launch("tpu-vm", "logs", *ADDRESS, *flags)
    assert (done.code, done.out) == (2, "")
    assert error in done.err
