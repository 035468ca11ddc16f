"""Which commit a revision means, and what is refused before anything is sent."""

import subprocess
from pathlib import Path

import pytest

from grpo_eqx.common.errors import UserError
from grpo_eqx.launch.tpu_vm.commit import resolve_commit


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.com"]
    done = subprocess.run(
        ["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def commit(folder: Path, text: str) -> str:
    (folder / "file").write_text(text)
    git(folder, "add", "file")
    git(folder, "commit", "-q", "-m", text)
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture
def origin(tmp_path: Path) -> Path:
    folder = tmp_path / "origin.git"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    git(folder, "config", "receive.denyCurrentBranch", "ignore")
    commit(folder, "one")
    git(folder, "tag", "-a", "v1", "-m", "annotated")
    return folder


@pytest.fixture
def checkout(tmp_path: Path, origin: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "checkout"
    git(tmp_path, "clone", "-q", str(origin), str(folder))
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize("revision", ["HEAD", "main", "v1"])
def test_elsewhere_the_repository_is_asked(
    origin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, revision: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_commit(str(origin), revision) == git(origin, "rev-parse", "HEAD")


@pytest.mark.parametrize("revision", ["HEAD", "main", "v1", "HEAD^{commit}"])
def test_in_a_checkout_it_is_the_checkouts(origin: Path, checkout: Path, revision: str) -> None:
    assert resolve_commit(str(origin), revision) == git(checkout, "rev-parse", "HEAD")
    assert resolve_commit(str(origin).removesuffix(".git"), revision)


def test_a_full_hash_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_commit("https://example.com/x.git", "a" * 40) == "a" * 40


def test_what_is_not_pushed_is_refused(origin: Path, checkout: Path) -> None:
    new = commit(checkout, "two")
    with pytest.raises(UserError, match=f"{new} is on no branch of origin.*push it"):
        resolve_commit(str(origin), "HEAD")
    git(checkout, "push", "-q")
    assert resolve_commit(str(origin), "HEAD") == new


def test_uncommitted_changes_are_refused(origin: Path, checkout: Path) -> None:
    older = git(checkout, "rev-parse", "HEAD")
    commit(checkout, "two")
    git(checkout, "push", "-q")
    (checkout / "file").write_text("changed")
    with pytest.raises(UserError, match="uncommitted changes"):
        resolve_commit(str(origin), "main")
    assert resolve_commit(str(origin), older) == older


@pytest.mark.parametrize("revision", ["no-such-branch", "", "--upload-pack=touch x", "abc123"])
def test_what_is_no_revision_is_refused(
    origin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, revision: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError):
        resolve_commit(str(origin), revision)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("user", ["canary", "user:canary"])
def test_a_token_in_the_url_is_refused_and_not_shown(user: str) -> None:
    with pytest.raises(UserError, match="--repo contains") as error:
        resolve_commit(f"https://{user}@example.com/x.git", "main")
    assert "canary" not in str(error.value)


@pytest.mark.parametrize("repo", ["", "--upload-pack=x"])
def test_what_is_no_url_is_refused(repo: str) -> None:
    with pytest.raises(UserError, match="give the URL"):
        resolve_commit(repo, "main")
