"""Base classes of the subcommands of `grpo-eqx`, and checks of their flags."""

import abc
import re
from typing import ClassVar

from grpo_eqx.common.errors import UserError


class CommandError(RuntimeError):
    """Failure of a host, or of the cloud, to do what it was asked; the message names which.

    Commands print the message alone, without a traceback, and exit with 1.
    """


class Subcommand(abc.ABC):
    """Flags as fields, which the command line fills in, and the action that they control."""

    takes_command: ClassVar[bool] = False
    """Whether a COMMAND follows `--`."""

    @abc.abstractmethod
    def run(self, command: tuple[str, ...]) -> int:
        """Executes the subcommand; returns the exit code.

        **Arguments:**

        - `command`: COMMAND, the words after `--`; empty if the subcommand takes none.
        """


class Group(abc.ABC):
    """Several subcommands under one name."""

    chosen: "Subcommand | Group"
    """The subcommand."""


def check_name(flag: str, value: str, pattern: str, rule: str) -> None:
    """Raises `UserError` unless the whole value matches the pattern.

    For values that cannot be quoted where they go, or would be rejected only later.
    """
    if not re.fullmatch(pattern, value):
        raise UserError(f"--{flag} is {value!r}: it must be {rule}.")


def check_at_least(flag: str, value: int, least: int) -> None:
    """Raises `UserError` for smaller values."""
    if value < least:
        raise UserError(f"--{flag} is {value}: it must be at least {least}.")
