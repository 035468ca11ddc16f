"""A cloud in a folder: a stand-in for gcloud, and a home folder for each worker."""

import json
import os
import select
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ADDRESSES = [f"203.0.113.{i}" for i in range(4)]
SECRETS = {
    "HF_TOKEN": "hf_canary",
    "WANDB_API_KEY": 'wandb canary $HOME `id` "it\'s" \\ ; é',
}


class Cloud:
    """What gcloud was asked, and what it answers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.plan: dict[str, Any] = {"answers": [], "node": {}, "tries": 1}
        self.vm("v4-16", 2)

    def vm(self, accelerator: str, workers: int, state: str = "READY") -> None:
        """The VM that there is."""
        self.plan["node"] = {
            "state": state,
            "acceleratorType": accelerator,
            "networkEndpoints": [
                {"ipAddress": f"10.0.0.{i}", "accessConfig": {"externalIp": ADDRESSES[i]}}
                for i in range(workers)
            ],
        }
        for i in range(workers):
            (self.folder / f"worker{i}").mkdir(exist_ok=True)
        self.save()

    def fail(self, *arguments: str, errors: str, code: int = 1) -> None:
        """Calls with these arguments fail."""
        self.plan["answers"].append({"to": arguments, "errors": errors, "code": code})
        self.save()

    def try_each_twice(self) -> None:
        """As gcloud does after a connection broke."""
        self.plan["tries"] = 2
        self.save()

    def save(self) -> None:
        (self.folder / "plan.json").write_text(json.dumps(self.plan))

    def calls(self) -> list[list[str]]:
        """The arguments of all calls so far, after `gcloud compute tpus tpu-vm`."""
        return [call["arguments"][3:] for call in self.records()]

    def records(self) -> list[dict[str, Any]]:
        path = self.folder / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def forget(self) -> None:
        (self.folder / "calls.jsonl").unlink(missing_ok=True)

    def pod_folder(self, worker: int) -> Path:
        """What is kept on a worker."""
        return self.folder / f"worker{worker}" / "grpo-eqx"

    def set_up(self, workers: int = 2) -> None:
        """As after bootstrap."""
        for i in range(workers):
            (self.pod_folder(i) / "repo").mkdir(parents=True)
            (self.pod_folder(i) / "venv/bin").mkdir(parents=True)
            (self.pod_folder(i) / "venv/bin/python").symlink_to(sys.executable)

    def wait_for(self, run: str, workers: int = 2) -> list[tuple[str, str]]:
        """Waits for the end of a run; its exit code and log on each worker."""
        ends = []
        for i in range(workers):
            folder = self.pod_folder(i) / "runs" / run
            wait_for_process(int((folder / "pid").read_text()))
            log = (folder / "log").read_text(errors="replace")
            ends.append(((folder / "exit").read_text().strip(), log))
        return ends

    def pids(self) -> list[int]:
        return [int(path.read_text()) for path in self.folder.glob("worker*/grpo-eqx/runs/*/pid")]


def wait_for_process(pid: int) -> None:
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    assert select.select([process], [], [], 20)[0], f"process {pid} goes on"
    os.close(process)


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    folder = tmp_path / "cloud"
    (folder / "bin").mkdir(parents=True)
    (folder / "remote-bin").mkdir()
    gcloud = folder / "bin" / "gcloud"
    standin = Path(__file__).with_name("gcloud_standin.py").read_text()
    gcloud.write_text(f"#!{sys.executable} -IS\n{standin}")
    gcloud.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("GCLOUD_STANDIN", str(folder))
    yield (made := Cloud(folder))
    for pid in made.pids():
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


@pytest.fixture
def env_file(tmp_path: Path) -> Path:
    """Two secrets."""
    path = tmp_path / "secrets.env"
    path.touch(mode=0o600)
    path.write_text(
        "# tokens\n\n" + "".join(f"{name}={value}\n" for name, value in SECRETS.items())
    )
    return path


@pytest.fixture
def secrets() -> dict[str, str]:
    return SECRETS
