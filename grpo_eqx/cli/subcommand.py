"""What every subcommand of `grpo-eqx` is."""

import abc
from typing import ClassVar


class CommandError(RuntimeError):
    """A host, or the cloud, failed at what it was asked to do; the message names which.

    Commands print the message alone, without a traceback, and exit with 1.
    """


class Subcommand(abc.ABC):
    """Flags as fields, which the command line fills in, and what to do with them."""

    takes_command: ClassVar[bool] = False
    """Whether a COMMAND follows `--`."""

    @abc.abstractmethod
    def run(self, command: tuple[str, ...]) -> int:
        """Does it; returns the exit code. **Arguments:** COMMAND, empty where none is taken."""


class Group(abc.ABC):
    """Several subcommands under one name."""

    chosen: "Subcommand | Group"
    """The subcommand."""
