"""Secrets go to all workers, and nowhere else."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Launch = Callable[..., Any]
ADDRESS = ("--name", "my-vm", "--zone", "us-central2-b", "--type", "v4-16")


def test_every_worker_gets_the_file_for_its_owner_alone(
    launch: Launch, cloud: Any, env_file: Path
) -> None:
    done = launch("tpu-vm", "sync-env", *ADDRESS, "--env-file", str(env_file))
    assert (done.code, done.out) == (0, "all 2 workers have the environment file\n"), done.err
    for worker in (0, 1):
        folder = cloud.pod_folder(worker)
        assert (folder / "env").read_bytes() == env_file.read_bytes()
        assert (folder / "env").stat().st_mode & 0o777 == 0o600
        assert folder.stat().st_mode & 0o777 == 0o700
        assert (folder.parent / "mode_before_copy").read_text() == "700"
        assert [path.name for path in folder.iterdir()] == ["env"]


def test_a_folder_and_a_file_that_were_open_are_closed(
    launch: Launch, cloud: Any, env_file: Path
) -> None:
    folder = cloud.pod_folder(0)
    folder.mkdir(mode=0o755)
    for name in ("env", "env.new"):
        (folder / name).write_text("old")
        (folder / name).chmod(0o644)
    launch("tpu-vm", "sync-env", *ADDRESS, "--env-file", str(env_file))
    assert (folder.parent / "mode_before_copy").read_text() == "700"
    assert (folder / "env").stat().st_mode & 0o777 == 0o600
    assert (folder / "env").read_bytes() == env_file.read_bytes()


@pytest.mark.parametrize("action", ["ssh", "scp"])
def test_a_worker_that_fails_is_named(
    launch: Launch, cloud: Any, env_file: Path, action: str
) -> None:
    cloud.fail(action, "--worker=1", errors="Connection refused", code=255)
    done = launch("tpu-vm", "sync-env", *ADDRESS, "--env-file", str(env_file))
    assert (done.code, done.out) == (1, "")
    assert "worker 1 (203.0.113.1), exit code 255:\n    Connection refused" in done.err
    assert "worker 0" not in done.err


def test_no_secret_is_in_an_argument_or_in_output(
    launch: Launch, cloud: Any, env_file: Path, secrets: dict[str, str]
) -> None:
    cloud.set_up()
    env = ("--env-file", str(env_file))
    outcomes = [
        launch("tpu-vm", "sync-env", *ADDRESS, *env, "--dry-run"),
        launch("tpu-vm", "sync-env", *ADDRESS, *env),
        launch("tpu-vm", "run", *ADDRESS, "--run-name", "r", "--", "true"),
        launch("tpu-vm", "run", *ADDRESS, "--run-name", "r", "--", "true"),  # fails
        launch("tpu-vm", "status", *ADDRESS),
        launch("tpu-vm", "logs", *ADDRESS),
        launch("tpu-vm", "bootstrap", *ADDRESS, "--repo", "file:///none", "--commit", "0" * 40),
    ]
    cloud.fail("scp", errors="failed")
    outcomes.append(launch("tpu-vm", "sync-env", *ADDRESS, *env))
    assert [outcome.code for outcome in outcomes] == [0, 0, 0, 1, 0, 0, 1, 1]
    seen = str(outcomes) + (cloud.folder / "calls.jsonl").read_text()
    for value in secrets.values():
        assert value.split()[0] not in seen
    assert "canary" not in seen
    assert all(record["stdin"] == "" for record in cloud.records())
