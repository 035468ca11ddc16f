"""Resolution of a repository and a revision to a commit, before anything is sent anywhere."""

import os
import re
import subprocess
from urllib.parse import urlsplit

from grpo_eqx.common.errors import UserError


def resolve_commit(repo: str, revision: str) -> str:
    """Returns the full hash of a revision. Raises `UserError` if workers could not clone it.

    In a checkout that has the repository as a remote, these are commits that are not pushed, and
    HEAD with uncommitted changes. Elsewhere the repository itself is queried.
    """
    _check_url(repo)
    if not revision or revision.startswith("-"):
        raise UserError(f"--commit is {revision!r}: give a commit, a branch or a tag.")
    remote = _remote_of(repo)
    local = _git("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}") if remote else None
    if remote and local:
        _check_pushed(remote, local)
        return local
    if re.fullmatch("[0-9a-f]{40}", revision):
        return revision
    return _of_repository(repo, revision)


def _check_url(repo: str) -> None:
    if not repo or repo.startswith("-"):
        raise UserError(f"--repo is {repo!r}: give the URL to clone.")
    url = urlsplit(repo)
    if url.scheme in ("http", "https") and "@" in url.netloc:
        raise UserError(
            "--repo contains a user name or a token, which command lines would show to others: "
            "remove it from the URL, and let git on the workers supply it."
        )


def _remote_of(repo: str) -> str | None:
    """Returns the remote of the current folder's checkout that has this URL, if any."""
    for line in (_git("config", "--get-regexp", r"^remote\..*\.url$") or "").splitlines():
        key, _, url = line.partition(" ")
        if _plain(url) == _plain(repo):
            return key.removeprefix("remote.").removesuffix(".url")
    return None


def _plain(url: str) -> str:
    return url.rstrip("/").removesuffix(".git")


def _check_pushed(remote: str, commit: str) -> None:
    if commit == _git("rev-parse", "HEAD") and _git("status", "--porcelain", "-uno"):
        raise UserError("there are uncommitted changes, which workers would not get: commit them.")
    if not _git("for-each-ref", "--count=1", f"--contains={commit}", f"refs/remotes/{remote}"):
        raise UserError(
            f"commit {commit} is on no branch of {remote} that git knows of: push it, or fetch."
        )


def _of_repository(repo: str, revision: str) -> str:
    names = [f"refs/tags/{revision}^{{}}", f"refs/tags/{revision}", f"refs/heads/{revision}"]
    if revision == "HEAD":
        names = ["HEAD"]
    found = _git("ls-remote", "--", repo, *names)
    commits = {name: commit for commit, name in map(str.split, (found or "").splitlines())}
    for name in names:
        if name in commits:
            return commits[name]
    raise UserError(
        f"{repo} has no branch or tag {revision}, or cannot be read: check both, or give the full "
        f"hash of a commit."
    )


def _git(*arguments: str) -> str | None:
    """Runs git; returns its output, or `None` if it fails."""
    try:
        done = subprocess.run(
            ["git", *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "GIT_TERMINAL_PROMPT": "0"},
        )
    except FileNotFoundError as error:
        raise UserError("git is not on PATH: install it.") from error
    return None if done.returncode else done.stdout.strip()
