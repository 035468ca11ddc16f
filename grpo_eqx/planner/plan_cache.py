"""Disk cache of answers that take minutes."""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from grpo_eqx.common.errors import FileError
from grpo_eqx.common.read_files import read_object
from grpo_eqx.training.compilation import cache_folder


def remembered(
    question: Mapping[str, Any], answer: Callable[[], Mapping[str, Any]]
) -> Mapping[str, Any]:
    """Returns the answer to a question, both plain JSON; computes it only if it is not on disk.

    The question must name all that the answer depends on. Answers are kept in `grpo_eqx/plans`
    under `$XDG_CACHE_HOME`, by default `~/.cache`; where that is not writable, nothing is kept.
    """
    known = recalled(question)
    if known is None:
        known = answer()
        keep(question, known)
    return known


def recalled(question: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns the answer on disk; `None` if there is none."""
    try:
        return read_object(_path(question))
    except (FileError, RuntimeError):  # of a user without a home
        return None


def keep(question: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
    """Writes the answer to disk, whole or not at all."""
    try:
        path = _path(question)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            file.write(json.dumps(answer))
        os.replace(file.name, path)
    except (OSError, RuntimeError):
        return


def _path(question: Mapping[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()
    return cache_folder("plans") / f"{digest[:32]}.json"
