"""Starting a run on all workers, with the remote scripts really executed."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Launch = Callable[..., Any]
ADDRESS = ("--name", "my-vm", "--zone", "us-central2-b", "--type", "v4-16")
SHOW = "import json, os, sys; print(json.dumps([dict(os.environ), os.getcwd(), sys.argv[1:]]))"


def run(launch: Launch, name: str, *command: str, flags: tuple[str, ...] = ()) -> Any:
    return launch("tpu-vm", "run", *ADDRESS, "--run-name", name, *flags, "--", *command)


@pytest.fixture(autouse=True)
def workers(cloud: Any) -> None:
    cloud.set_up()


def test_it_runs_on_all_workers_with_arguments_and_secrets_as_they_are(
    launch: Launch,
    cloud: Any,
    env_file: Path,
    secrets: dict[str, str],
    hostile: tuple[str, ...],
) -> None:
    launch("tpu-vm", "sync-env", *ADDRESS, "--env-file", str(env_file))
    done = run(launch, "first", "python", "-X", "utf8", "-c", SHOW, *hostile)
    assert (done.code, done.out) == (0, "started first on all 2 workers\n"), done.err
    for worker, (code, log) in enumerate(cloud.wait_for("first")):
        assert code == "0", log
        environment, folder, arguments = json.loads(log)
        assert arguments == list(hostile)
        assert {name: environment[name] for name in secrets} == secrets
        assert environment["GRPO_EQX_REQUIRE_PROCESSES"] == "2"
        assert folder == str(cloud.pod_folder(worker) / "repo")


def test_it_uses_the_workers_own_python(launch: Launch, cloud: Any) -> None:
    run(launch, "first", "bash", "-c", "command -v python")
    for worker, (_, log) in enumerate(cloud.wait_for("first")):
        assert log.strip() == str(cloud.pod_folder(worker) / "venv/bin/python")


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (("bash", "-c", "exit 7"), "7"),
        (("bash", "-c", "kill -9 $$"), "137"),
        (("no-such-program",), "127"),
        (("exit", "3"), "127"),  # a word of the shell is no program
    ],
)
def test_the_exit_code_is_kept(
    launch: Launch, cloud: Any, command: tuple[str, ...], code: str
) -> None:
    assert run(launch, "first", *command).code == 0
    assert [found for found, _ in cloud.wait_for("first")] == [code, code]


def test_what_it_leaves_is_for_its_owner_alone(launch: Launch, cloud: Any) -> None:
    run(launch, "first", "true")
    cloud.wait_for("first")
    runs = cloud.pod_folder(0) / "runs"
    assert (runs / "latest").resolve() == (runs / "first").resolve()
    assert sorted(path.name for path in (runs / "first").iterdir()) == ["exit", "log", "pid"]
    assert (runs / "first").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in (runs / "first").iterdir()} == {0o600}


def test_it_outlives_the_connection_in_a_session_of_its_own(launch: Launch, cloud: Any) -> None:
    run(launch, "first", "sleep", "1000")
    for pid in cloud.pids():
        assert os.getsid(pid) == pid


def test_a_second_run_is_refused_on_all_while_one_is_running(launch: Launch, cloud: Any) -> None:
    run(launch, "first", "sleep", "1000")
    pid = cloud.pod_folder(1) / "runs/first/pid"
    done = run(launch, "second", "true")
    assert (done.code, done.out) == (1, "")
    assert "2 of 2 workers failed to prepare for the run" in done.err
    assert f"run first is in progress (process {pid.read_text().strip()})" in done.err
    assert "--replace" in done.err
    assert not list(cloud.folder.glob("worker*/grpo-eqx/runs/second"))


def test_where_one_worker_is_busy_none_starts(launch: Launch, cloud: Any) -> None:
    busy = cloud.pod_folder(1) / "runs/other"
    busy.mkdir(parents=True)
    with subprocess.Popen(["sleep", "1000"], start_new_session=True) as process:
        (busy / "pid").write_text(f"{process.pid}\n")
        done = run(launch, "first", "true")
        process.kill()
    assert done.code == 1
    assert "1 of 2 workers failed to prepare for the run: worker 1 (203.0.113.1)." in done.err
    assert not (cloud.pod_folder(0) / "runs/first").exists()


def test_asked_to_it_ends_the_running_one(launch: Launch, cloud: Any) -> None:
    run(launch, "first", "bash", "-c", "sleep 1000 & wait")
    done = run(launch, "second", "true", flags=("--replace",))
    assert done.code == 0, done.err
    assert [code for code, _ in cloud.wait_for("first")] == ["143", "143"]
    assert [code for code, _ in cloud.wait_for("second")] == ["0", "0"]


def test_after_one_ended_the_next_may_start_under_another_name(launch: Launch, cloud: Any) -> None:
    run(launch, "first", "true")
    cloud.wait_for("first")
    again = run(launch, "first", "true")
    assert again.code == 1
    assert "run first already exists: choose another --run-name" in again.err
    assert run(launch, "second", "true").code == 0


def test_a_connection_that_is_tried_again_starts_it_once(launch: Launch, cloud: Any) -> None:
    cloud.try_each_twice()
    assert run(launch, "first", "bash", "-c", 'echo x >>"$HOME/started"').code == 0
    cloud.wait_for("first")
    assert (cloud.folder / "worker0/started").read_text() == "x\n"


def test_a_worker_that_fails_to_start_is_named(launch: Launch, cloud: Any) -> None:
    (cloud.pod_folder(1) / "runs").write_text("a file, and not a folder")
    done = run(launch, "first", "sleep", "1000")
    assert done.code == 1
    assert "1 of 2 workers failed to start the run: worker 1 (203.0.113.1)." in done.err


def test_a_worker_that_is_not_set_up_is_named(launch: Launch, cloud: Any) -> None:
    (cloud.pod_folder(1) / "venv/bin/python").unlink()
    done = run(launch, "first", "true")
    assert done.code == 1
    assert "worker 1 (203.0.113.1), exit code 3" in done.err
    assert "run bootstrap first" in done.err


@pytest.mark.parametrize("name", ["../x", "a b", "$(id)", "", ".x", "latest", "a\n", "-x"])
def test_names_that_are_no_folder_are_refused(launch: Launch, cloud: Any, name: str) -> None:
    done = launch("tpu-vm", "run", *ADDRESS, f"--run-name={name}", "--", sys.executable)
    assert done.code == 2
    assert "--run-name is" in done.err
    assert cloud.calls() == []


def test_without_a_name_it_is_the_time(launch: Launch, cloud: Any) -> None:
    assert launch("tpu-vm", "run", *ADDRESS, "--", "true").code == 0
    names = [path.parent.name for path in cloud.folder.glob("worker*/grpo-eqx/runs/2*/pid")]
    assert len(names) == 2
    assert len(set(names)) == 1
    cloud.wait_for(names[0])
