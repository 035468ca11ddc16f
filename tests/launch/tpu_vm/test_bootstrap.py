"""Setting up all workers, with the remote script really executed."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Launch = Callable[..., Any]
ADDRESS = ("--name", "my-vm", "--zone", "us-central2-b", "--type", "v4-16")
PYTHON = """\
#!/bin/bash
# A python3 that installs, with pip, a uv that makes environments of nothing.
[ "$1 $2 $3" = "-m pip install" ] || exit 9
mkdir -p uv/bin
cat >uv/bin/uv <<'END'
#!/bin/bash
echo "$*" >>"$HOME/uv.log"
[ "$1" != venv ] || { mkdir -p venv/bin && ln -s /bin/true venv/bin/python; }
END
chmod +x uv/bin/uv
"""


@pytest.fixture
def remote_python(cloud: Any) -> None:
    python = cloud.folder / "remote-bin" / "python3"
    python.write_text(PYTHON)
    python.chmod(0o755)


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.com"]
    done = subprocess.run(
        ["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """A repository with two commits, in a folder with a name that shells stumble over."""
    folder = tmp_path / "it's $HOME; a repo"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    for text in ("one", "two"):
        (folder / "file").write_text(text)
        git(folder, "add", "file")
        git(folder, "commit", "-q", "-m", text)
    return folder


def bootstrap(launch: Launch, repo: Path, revision: str) -> Any:
    return launch("tpu-vm", "bootstrap", *ADDRESS, "--repo", f"file://{repo}", "--commit", revision)


@pytest.mark.usefixtures("remote_python")
def test_all_workers_get_the_same_commit_installed(launch: Launch, cloud: Any, repo: Path) -> None:
    commit = git(repo, "rev-parse", "main")
    done = bootstrap(launch, repo, "main")
    assert (done.code, done.out) == (0, f"all 2 workers have commit {commit}\n"), done.err
    for worker in (0, 1):
        folder = cloud.pod_folder(worker)
        assert folder.stat().st_mode & 0o777 == 0o700
        assert (folder / "repo" / "file").read_text() == "two"
        log = (folder.parent / "uv.log").read_text().splitlines()
        assert log == [
            "venv --quiet --python 3.12 venv",
            "pip install --quiet --python venv/bin/python -e ./repo[tpu]",
        ]


@pytest.mark.usefixtures("remote_python")
def test_again_it_moves_to_another_commit(launch: Launch, cloud: Any, repo: Path) -> None:
    assert bootstrap(launch, repo, git(repo, "rev-parse", "main~1")).code == 0
    assert (cloud.pod_folder(1) / "repo/file").read_text() == "one"
    (cloud.pod_folder(1) / "repo/file").write_text("changed on the worker")
    (repo / "file").write_text("three")
    git(repo, "commit", "-q", "-a", "-m", "three")
    assert bootstrap(launch, repo, "main").code == 0
    assert (cloud.pod_folder(1) / "repo/file").read_text() == "three"
    assert len((cloud.pod_folder(1).parent / "uv.log").read_text().splitlines()) == 3


@pytest.mark.usefixtures("remote_python")
def test_the_first_worker_is_met_alone_and_then_each_by_itself(
    launch: Launch, cloud: Any, repo: Path
) -> None:
    bootstrap(launch, repo, "main")
    actions = [(call[0], *[flag for flag in call if "--worker" in flag]) for call in cloud.calls()]
    assert actions[:2] == [("describe",), ("ssh", "--worker=0")]
    assert sorted(actions[2:]) == [("ssh", "--worker=0"), ("ssh", "--worker=1")]


@pytest.mark.usefixtures("remote_python")
def test_a_worker_that_fails_is_named_with_what_it_said(
    launch: Launch, cloud: Any, repo: Path
) -> None:
    cloud.fail("ssh", "--worker=1", errors="disk full", code=12)
    done = bootstrap(launch, repo, "main")
    assert (done.code, done.out) == (1, "")
    assert "1 of 2 workers failed to install the repository: worker 1 (203.0.113.1)." in done.err
    assert "worker 1 (203.0.113.1), exit code 12:\n    disk full" in done.err
    assert "worker 0" not in done.err


@pytest.mark.usefixtures("remote_python")
def test_a_commit_that_cannot_be_had_fails_on_all(launch: Launch, repo: Path) -> None:
    done = bootstrap(launch, repo, "0" * 40)
    assert done.code == 1
    assert "2 of 2 workers failed" in done.err
    assert "0" * 40 in done.err


@pytest.mark.parametrize(
    ("vm", "error", "code"),
    [
        (("v4-8", 1), "--type is v4-16, but my-vm is a v4-8", 2),
        (("v4-16", 1), "my-vm has 1 workers, but a v4-16 has 2", 1),
        (("v4-16", 2, "PREEMPTED"), "my-vm is PREEMPTED, not READY", 1),
    ],
)
def test_another_vm_than_it_should_be_is_refused(
    launch: Launch, cloud: Any, repo: Path, vm: tuple[Any, ...], error: str, code: int
) -> None:
    cloud.vm(*vm)
    done = bootstrap(launch, repo, "main")
    assert done.code == code
    assert error in done.err
    assert [call[0] for call in cloud.calls()] == ["describe"]


def test_a_vm_that_does_not_exist_is_said_so(launch: Launch, cloud: Any, repo: Path) -> None:
    cloud.fail("describe", errors="ERROR: NOT_FOUND")
    done = bootstrap(launch, repo, "main")
    assert done.code == 1
    assert "cannot describe my-vm in us-central2-b:\n    ERROR: NOT_FOUND" in done.err
