"""Running a script from a command line: flags in, one-line errors out."""

import argparse
import dataclasses
import sys
from collections.abc import Callable

import tyro

from grpo_eqx.config import GRPOConfig
from grpo_eqx.errors import EXIT_USER_ERROR, UserError
from grpo_eqx.recipes import RECIPES, RecipeName


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Flags(GRPOConfig):
    """The fields alone: tyro would frame a `UserError` of the config's own checks in a box."""

    recipe: RecipeName | None = None
    """Start from the settings of a published recipe; other flags change them."""

    def __post_init__(self) -> None:
        pass


def run(main: Callable[[GRPOConfig], None]) -> None:
    """Calls `main` with the config that the command line describes, every field a flag.

    `--recipe` names the config to start from, whose settings become the flags' defaults. A
    `UserError` ends the process with one line and `EXIT_USER_ERROR`.
    """
    flags = tyro.cli(_Flags, description=main.__doc__, default=_defaults(sys.argv[1:]))
    fields = dataclasses.asdict(flags)
    del fields["recipe"]
    try:
        main(GRPOConfig(**fields))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)


def _defaults(arguments: list[str]) -> _Flags:
    """The flags' defaults: those of the recipe that the arguments name, if any."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--recipe", nargs="?")
    name = parser.parse_known_args(arguments)[0].recipe
    if name not in RECIPES:  # tyro says what is wrong with it
        return _Flags()
    return _Flags(**dataclasses.asdict(RECIPES[name]()), recipe=name)
