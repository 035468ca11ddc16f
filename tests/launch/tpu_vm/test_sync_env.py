"""Secrets go to all workers, and nowhere else."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_eqx.common.errors import UserError
from grpo_eqx.launch.tpu_vm.sync_env import check_env_file

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


def file(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / ".env"
    path.write_bytes(text.encode())
    path.chmod(mode)
    return path


def test_names_and_values_as_they_are(tmp_path: Path) -> None:
    path = file(
        tmp_path, "# a comment\n\nA=1\n_b2=x=y 'z' \"$HOME\" # all of it\nEMPTY=\nU=é\u2028é"
    )
    assert check_env_file(path) == path


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("export A=canary", "is not NAME=VALUE"),
        (" A=canary", "is not NAME=VALUE"),
        ("canary", "is not NAME=VALUE"),
        ("1A=canary", "is not NAME=VALUE"),
        ("A B=canary", "is not NAME=VALUE"),
        ("A= canary", "whitespace around the value of A"),
        ("A=canary\r", "whitespace around the value of A"),
        ("A=can\0ary", "a null byte"),
        ("A='canary'", "quotes around the value of A"),
        ('A="canary"', "quotes around the value of A"),
    ],
)
def test_what_would_be_read_otherwise_is_refused_without_showing_it(
    tmp_path: Path, line: str, error: str
) -> None:
    with pytest.raises(UserError, match=error) as refused:
        check_env_file(file(tmp_path, f"OK=1\n{line}\n"))
    assert str(refused.value).startswith(f"line 2 of {tmp_path}")
    assert "canary" not in str(refused.value)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604])
def test_a_file_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(UserError, match="chmod 600"):
        check_env_file(file(tmp_path, "A=1\n", mode))


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        check_env_file(tmp_path / "none")
    path = file(tmp_path, "")
    path.write_bytes(b"A=\xff\n")
    with pytest.raises(UserError, match="not encoded in UTF-8"):
        check_env_file(path)


def test_a_path_that_gcloud_would_take_for_a_host_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "a:b"
    folder.mkdir()
    with pytest.raises(UserError, match="has a ':'"):
        check_env_file(file(folder, "A=1\n"))
