"""How a VM and its workers are."""

import os
import signal
from collections.abc import Callable
from typing import Any

Launch = Callable[..., Any]
ADDRESS = ("--name", "my-vm", "--zone", "us-central2-b", "--type", "v4-32")
FIRST = "my-vm, v4-32 in us-central2-b: READY"


def test_every_worker_by_name(launch: Launch, cloud: Any) -> None:
    cloud.vm("v4-32", 4)
    cloud.set_up(4)
    # The last worker goes on; the others end, and one loses what it knew.
    end = "case $HOME in *3) sleep 1000 ;; *) exit 7 ;; esac"
    launch("tpu-vm", "run", *ADDRESS, "--run-name", "r", "--", "bash", "-c", end)
    cloud.wait_for("r", workers=3)
    (cloud.pod_folder(2) / "runs/r/exit").unlink()
    (cloud.pod_folder(1) / "runs/latest").unlink()
    done = launch("tpu-vm", "status", *ADDRESS)
    pid = (cloud.pod_folder(3) / "runs/r/pid").read_text().strip()
    assert (done.code, done.out.splitlines()) == (
        0,
        [
            FIRST,
            "worker 0 (203.0.113.0): exit code 7 of run r",
            "worker 1 (203.0.113.1): not started",
            "worker 2 (203.0.113.2): run r ended without an exit code: it was killed, or the VM "
            "restarted",
            f"worker 3 (203.0.113.3): running r, process {pid}",
        ],
    )
    os.killpg(int(pid), signal.SIGKILL)


def test_a_worker_that_cannot_be_reached_is_named(launch: Launch, cloud: Any) -> None:
    cloud.vm("v4-32", 4)
    cloud.fail("ssh", "--worker=2", errors="Connection timed out", code=255)
    done = launch("tpu-vm", "status", *ADDRESS)
    assert done.code == 1
    assert (
        "worker 2 (203.0.113.2): unreachable, exit code 255\n    Connection timed out" in done.out
    )
    assert done.out.count("not started") == 3


def test_workers_of_a_vm_that_is_gone_are_not_asked(launch: Launch, cloud: Any) -> None:
    cloud.vm("v4-32", 4, "PREEMPTED")
    done = launch("tpu-vm", "status", *ADDRESS)
    assert (done.code, done.out) == (1, FIRST.replace("READY", "PREEMPTED") + "\n")
    assert [call[0] for call in cloud.calls()] == ["describe"]


def test_another_type_is_refused(launch: Launch, cloud: Any) -> None:
    cloud.vm("v4-16", 2)
    done = launch("tpu-vm", "status", *ADDRESS)
    assert done.code == 2
    assert "--type is v4-32, but my-vm is a v4-16" in done.err
