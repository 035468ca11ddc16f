"""Files rendered from the package's templates, for other launchers to read."""

import string
from importlib import resources
from pathlib import Path

from grpo_eqx.common.clean_text import print_clean
from grpo_eqx.common.errors import UserError

SHARED = "/shared"
"""Folder at which printed files mount storage that all hosts share."""


class _Template(string.Template):
    """Template with `@{name}`, since `$` is the shell's."""

    delimiter = "@"


def render(template: str, **values: str | int) -> str:
    """Fills in the template of that name. Values must already be quoted for where they go."""
    text = resources.files(__package__).joinpath("templates", template).read_text("utf-8")
    return _Template(text).substitute(values)


def write(text: str, output: Path | None) -> None:
    """Writes to a file, or to standard output."""
    if output is None:
        print_clean(text, end="")
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"cannot write {output} ({error.strerror}): choose another --output."
        ) from error
