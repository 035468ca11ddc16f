"""Copying what a run made from a worker to this machine."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Launch = Callable[..., Any]
ADDRESS = ("--name", "my-vm", "--zone", "us-central2-b", "--type", "v4-16")


@pytest.fixture(autouse=True)
def _run(cloud: Any) -> None:
    """A run's folder on worker 1, where runs start."""
    run = cloud.pod_folder(1) / "repo/runs/mine"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text("{}\n")


def test_a_folder_is_copied_into_one_here(launch: Launch, cloud: Any, tmp_path: Path) -> None:
    to = tmp_path / "fetched/here"
    flags = ("--path", "runs/mine", "--to", str(to), "--worker", "1")
    done = launch("tpu-vm", "fetch", *ADDRESS, *flags)
    assert (done.code, done.out) == (0, f"copied runs/mine of worker 1 into {to}\n"), done.err
    assert (to / "mine/metrics.jsonl").read_text() == "{}\n"


def test_a_file_is_copied(launch: Launch, cloud: Any, tmp_path: Path) -> None:
    flags = ("--path", "runs/mine/metrics.jsonl", "--to", str(tmp_path), "--worker", "1")
    assert launch("tpu-vm", "fetch", *ADDRESS, *flags).code == 0
    assert (tmp_path / "metrics.jsonl").read_text() == "{}\n"


def test_an_absolute_path_stays_one(launch: Launch, cloud: Any, tmp_path: Path) -> None:
    (tmp_path / "shared/mine").mkdir(parents=True)
    flags = ("--path", str(tmp_path / "shared/mine"), "--to", str(tmp_path / "here"))
    done = launch("tpu-vm", "fetch", *ADDRESS, *flags)
    assert done.code == 0, done.err
    assert (tmp_path / "here/mine").is_dir()


def test_a_failure_is_said(launch: Launch, cloud: Any, tmp_path: Path) -> None:
    cloud.fail("scp", errors="scp: /shared/mine: No such file or directory")
    done = launch("tpu-vm", "fetch", *ADDRESS, "--path", "/shared/mine", "--to", str(tmp_path))
    assert (done.code, done.out) == (1, "")
    assert "failed to copy /shared/mine: worker 0 (203.0.113.0)" in done.err
    assert "No such file or directory" in done.err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--path", "~/x"), "--path is '~/x'"),
        (("--path", "other:x"), "--path is 'other:x'"),
        (("--path", ""), "--path is ''"),
        (("--path", "x", "--worker", "2"), "--worker is 2: it must be from 0 to 1"),
        (("--path", "x", "--to", "FILE"), "which is a file: give a folder"),
    ],
)
def test_what_cannot_be_copied_is_refused(
    launch: Launch, cloud: Any, tmp_path: Path, flags: tuple[str, ...], said: str
) -> None:
    (tmp_path / "file").touch()
    given = [str(tmp_path / "file") if flag == "FILE" else flag for flag in flags]
    done = launch("tpu-vm", "fetch", *ADDRESS, *given)
    assert done.code == 2
    assert said in done.err
    assert not [call for call in cloud.calls() if call[0] == "scp"]
