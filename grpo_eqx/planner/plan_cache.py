"""Disk cache of answers that take minutes."""

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
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
    digest = hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()
    try:
        path = cache_folder("plans") / f"{digest[:32]}.json"
    except RuntimeError:  # of a user without a home
        return answer()
    with contextlib.suppress(FileError):
        return read_object(path)
    computed = answer()
    with contextlib.suppress(OSError):  # whole or not at all
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            file.write(json.dumps(computed))
        os.replace(file.name, path)
    return computed
