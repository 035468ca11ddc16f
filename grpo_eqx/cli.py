"""Running a script from a command line: flags in, one-line errors out."""

import sys
from collections.abc import Callable

import tyro

from grpo_eqx.config import GRPOConfig
from grpo_eqx.errors import EXIT_USER_ERROR, UserError


def run(main: Callable[[GRPOConfig], None]) -> None:
    """Calls `main` with the config that the command line describes, every field a flag.

    A `UserError` ends the process with its message alone and `EXIT_USER_ERROR`.
    """
    try:
        main(tyro.cli(GRPOConfig, description=main.__doc__))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)
