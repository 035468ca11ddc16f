"""Ending a run on all workers, with the remote scripts really executed."""

import os
import select
from collections.abc import Callable
from pathlib import Path
from typing import Any

Launch = Callable[..., Any]
ADDRESS = ("--name", "my-vm", "--zone", "us-central2-b", "--type", "v4-16")
SAVES = "trap 'echo saved; exit 75' TERM; echo >started; while :; do sleep 60 & wait $!; done"


def start(launch: Launch, cloud: Any) -> None:
    """Starts a run that saves its step when it is asked to end, and waits until it would."""
    signs = [cloud.pod_folder(worker) / "repo/started" for worker in (0, 1)]
    for sign in signs:
        os.mkfifo(sign)
    launch("tpu-vm", "run", *ADDRESS, "--run-name", "mine", "--", "bash", "-c", SAVES)
    for sign in signs:
        wait_for_a_line(sign)


def wait_for_a_line(fifo: Path) -> None:
    file = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    assert select.select([file], [], [], 20)[0], f"nothing was written to {fifo}"
    os.close(file)


def test_the_run_may_save_its_step_and_the_vm_is_free(launch: Launch, cloud: Any) -> None:
    cloud.set_up()
    start(launch, cloud)
    done = launch("tpu-vm", "stop", *ADDRESS)
    assert done.code == 0, done.err
    said = "run mine ended with exit code 75"
    assert done.out.splitlines() == [f"worker {i} (203.0.113.{i}): {said}" for i in (0, 1)]
    assert cloud.wait_for("mine") == [("75", "saved\n")] * 2
    assert launch("tpu-vm", "run", *ADDRESS, "--run-name", "next", "--", "true").code == 0
    cloud.wait_for("next")


def test_where_nothing_runs_it_says_so(launch: Launch, cloud: Any) -> None:
    cloud.set_up()
    done = launch("tpu-vm", "stop", *ADDRESS)
    assert done.code == 0, done.err
    assert done.out.count("no run is in progress") == 2


def test_a_worker_that_is_not_set_up_is_named(launch: Launch, cloud: Any) -> None:
    done = launch("tpu-vm", "stop", *ADDRESS)
    assert done.code == 1
    assert "worker 1 (203.0.113.1), exit code 3" in done.err
    assert "run bootstrap first" in done.err
