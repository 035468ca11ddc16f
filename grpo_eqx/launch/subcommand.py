"""Base classes of the subcommands of `grpo-eqx`."""

import abc
from typing import ClassVar


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
        """Executes it; returns the exit code. **Arguments:** COMMAND, empty if none is taken."""


class Group(abc.ABC):
    """Several subcommands under one name."""

    chosen: "Subcommand | Group"
    """The subcommand."""
