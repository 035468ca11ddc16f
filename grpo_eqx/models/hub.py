"""Downloads from the Hugging Face hub: `owner/name`, or `owner/name@revision`."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from grpo_eqx.common.errors import RunError, UserError, first_line

Kind = Literal["model", "dataset"]
_COMMIT = re.compile("[0-9a-f]{40}")
VOCABULARY_FILES = (
    "tokenizer.json", "*tekken*.json", "*vocab*.json", "*vocab*.txt", "dict.txt", "*.vocab",
    "*.model", "*.model.v*", "*.spm", "*.tiktoken", "*.bpe", "*.codes", "*.tokenizer",
)  # fmt: skip
"""Patterns of the files that hold a tokenizer's tokens, of any kind that transformers reads."""
MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", *VOCABULARY_FILES)
"""Patterns of the files of a model that are downloaded: safetensors and texts, without code."""
_snapshots: dict[tuple[Kind, str], Path] = {}
"""Folders by name, so that a branch that moves is one commit for a whole process."""


class HubName(NamedTuple):
    """A repository on the hub, and the branch, tag or commit to take of it."""

    repository: str
    revision: str | None
    """`None`: the newest commit."""

    @classmethod
    def parse(cls, setting: str, name: str, embedded: str) -> "HubName":
        """Parses a name that is not a local path; raises `UserError` for a misplaced revision.

        **Arguments:**

        - `setting`: the setting that gives the name, for messages.
        - `name`: the name.
        - `embedded`: the name that ships with the package and is not on the hub.
        """
        repository, at, revision = name.partition("@")
        if not at:
            return cls(repository, None)
        if repository == embedded or os.path.exists(repository):
            raise UserError(
                f"{setting} is {name!r}, but only names on the Hugging Face hub have revisions: "
                f"use {repository!r}."
            )
        if not revision:
            raise UserError(
                f"{setting} is {name!r}: give a branch, tag or commit after the @, or leave it out."
            )
        return cls(repository, revision)


def download(kind: Kind, name: HubName, *, allow: Sequence[str] | None = None) -> Path:
    """Returns the folder of a repository's files, downloaded where they are not cached.

    **Arguments:**

    - `kind`: what the repository holds.
    - `name`: its name.
    - `allow`: patterns of the files to download; by default all but Python code.

    Raises the hub's errors. Without a network, or with `HF_HUB_OFFLINE=1`, a revision that is
    cached is found.
    """
    from huggingface_hub import snapshot_download

    key = _key(kind, name)
    if key not in _snapshots:
        _snapshots[key] = Path(
            snapshot_download(
                name.repository,
                repo_type=kind,
                revision=name.revision,
                allow_patterns=None if allow is None else list(allow),
                ignore_patterns=["*.py"],
            )
        )
    return _snapshots[key]


def downloaded(kind: Kind, name: HubName) -> Path | None:
    """Returns the folder of a repository that this process has downloaded, if it has."""
    return _snapshots.get(_key(kind, name))


def _key(kind: Kind, name: HubName) -> tuple[Kind, str]:
    return kind, "@".join(part for part in name if part is not None)


def failed_download(path: Path) -> str | None:
    """Returns what a file holds instead of its content, and the fix, as a clause; `None` if not."""
    if not path.is_file():  # such as a pipe, which could be waited for forever
        return None
    with path.open("rb") as file:
        start = file.read(64)
    if start.startswith(b"version https://git-lfs"):
        return "it is a pointer of Git LFS; run git lfs pull"
    if start.lstrip()[:1] == b"<":
        return "it is a web page; download it again"
    return None


def upload(folder: Path, repository: str, *, private: bool | None, revision: str | None) -> str:
    """Uploads a model's folder to a repository, which is created where it does not exist.

    **Arguments:**

    - `folder`: the folder.
    - `repository`: `owner/name`, or a name without owner for your own account.
    - `private`: whether a new repository is private; by default as the account says.
    - `revision`: the branch; by default `main`.

    **Returns:** the address of the commit. Raises `UserError` for an impossible name, and
    `RunError` where the hub refuses or is not reached.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(repository)
    except (HFValidationError, TypeError) as error:
        raise UserError(f"repo_id is {repository!r}: use owner/name, or a name.") from error
    api = HfApi()
    try:
        created = api.create_repo(repository, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(created.repo_id, branch=revision, exist_ok=True)
        uploaded = api.upload_folder(
            folder_path=folder,
            repo_id=created.repo_id,
            revision=revision,
            commit_message="Upload a model trained with grpo_eqx",
        )
    except Exception as error:  # the hub's errors, and those of its HTTP library
        raise RunError(
            f"the model could not be uploaded to {repository!r} ({type(error).__name__}: "
            f"{first_line(error)}): check HF_TOKEN and the network, and call push_to_hub again."
        ) from error
    return str(uploaded.commit_url)


def commit(kind: Kind, name: str) -> str | None:
    """Returns the commit that this process has downloaded under a name, if it has."""
    folder = _snapshots.get((kind, name))
    return folder.name if folder is not None and _COMMIT.fullmatch(folder.name) else None
