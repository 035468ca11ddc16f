"""Ending a run on all workers, with the remote scripts really executed."""

from collections.abc import Callable
from typing import Any

Launch = Callable[..., Any]
ADDRESS = ("--name", "my-vm", "--zone", "us-central2-b", "--type", "v4-16")
SAVES = "trap 'echo saved; exit 75' TERM; echo started >started; while :; do sleep 0.01; done"


def test_the_run_may_save_its_step_and_the_vm_is_free(launch: Launch, cloud: Any) -> None:
    cloud.set_up()
    command = ("bash", "-c", f"{SAVES} & wait; wait")
    launch("tpu-vm", "run", *ADDRESS, "--run-name", "first", "--", *command)
    for worker in (0, 1):
        while not (cloud.pod_folder(worker) / "repo/started").exists():
            pass
    done = launch("tpu-vm", "stop", *ADDRESS)
    assert done.code == 0, done.err
    codes = {code for code, _ in cloud.wait_for("first")}
    assert len(codes) == 1
    said = f"run first ended with exit code {codes.pop()}"
    assert done.out.splitlines() == [f"worker {i} (203.0.113.{i}): {said}" for i in (0, 1)]
    assert all("saved" in log for _, log in cloud.wait_for("first"))
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
