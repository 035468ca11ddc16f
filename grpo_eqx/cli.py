"""Running a script from a command line: flags in, one-line errors out."""

import dataclasses
import sys
from collections.abc import Callable

import tyro

from grpo_eqx.config import GRPOConfig
from grpo_eqx.errors import EXIT_USER_ERROR, UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Flags(GRPOConfig):
    """The fields alone: tyro would frame a `UserError` of the config's own checks in a box."""

    def __post_init__(self) -> None:
        pass


def run(main: Callable[[GRPOConfig], None]) -> None:
    """Calls `main` with the config that the command line describes, every field a flag.

    A `UserError` ends the process with one line and `EXIT_USER_ERROR`.
    """
    flags = tyro.cli(_Flags, description=main.__doc__)
    try:
        main(GRPOConfig(**dataclasses.asdict(flags)))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)
