"""Running a script from a command line: flags in, one-line errors out."""

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

import tyro

from grpo_eqx.config import GRPOConfig
from grpo_eqx.distributed.cluster import COORDINATOR, NUM_PROCESSES, PROCESS_ID
from grpo_eqx.distributed.join import join_processes
from grpo_eqx.distributed.startup import leave_soon
from grpo_eqx.errors import EXIT_USER_ERROR, UserError
from grpo_eqx.recipes import RECIPES, RecipeName

Flags = TypeVar("Flags", bound="ConfigFlags")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConfigFlags(GRPOConfig):
    """Every field of a config as a flag."""

    recipe: RecipeName | None = None
    """Start from the settings of a published recipe; other flags change them."""

    def __post_init__(self) -> None:
        pass  # tyro would frame a `UserError` of the config's own checks in a box

    def config(self) -> GRPOConfig:
        """The config; raises `UserError` for settings that cannot be."""
        fields = dataclasses.fields(GRPOConfig)
        return GRPOConfig(**{field.name: getattr(self, field.name) for field in fields})

    @classmethod
    def of_recipe(cls: type[Flags], arguments: Sequence[str]) -> Flags:
        """The flags' defaults: those of the recipe that the arguments name, if any."""
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        parser.add_argument("--recipe", nargs="?")
        name = parser.parse_known_args(arguments)[0].recipe
        if name not in RECIPES:  # tyro says what is wrong with it
            return cls()
        return cls(**dataclasses.asdict(RECIPES[name]()), recipe=name)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFlags(ConfigFlags):
    """Those of a run, which can have several processes."""

    coordinator_address: str | None = None
    """Of several processes: where the first one listens for the others, host:port. None: found, as
    the next two, in what TPU VMs, GKE, Slurm or the launcher say."""
    num_processes: int | None = None
    """How many processes there are, one a host."""
    process_id: int | None = None
    """Which of them this is, from 0."""

    def export(self) -> None:
        """Tells the rest of this process which of how many it is, as launchers do."""
        given = {
            COORDINATOR: self.coordinator_address,
            NUM_PROCESSES: self.num_processes,
            PROCESS_ID: self.process_id,
        }
        os.environ.update({name: str(value) for name, value in given.items() if value is not None})


def run(main: Callable[[GRPOConfig], None]) -> None:
    """Calls `main` with the config that the command line describes, every field a flag.

    `--recipe` names the config to start from, whose settings become the flags' defaults. A
    `UserError` ends the process with one line and `EXIT_USER_ERROR`.
    """
    default = RunFlags.of_recipe(sys.argv[1:])
    start(tyro.cli(RunFlags, description=main.__doc__, default=default), main)


def start(flags: RunFlags, main: Callable[[GRPOConfig], None]) -> None:
    """Joins the processes of a run and calls `main` with its config."""
    flags.export()
    try:
        cfg = flags.config()
        join_processes(cfg)
        main(cfg)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        leave_soon(EXIT_USER_ERROR)
        sys.exit(EXIT_USER_ERROR)
