"""Console that a run prints on."""

import contextlib

from rich.console import Console

from grpo_eqx.errors import EXIT_PIPE_CLOSED


class RunConsole(Console):
    """Console of a run, which ends as a process does whose output nobody reads any more."""

    def on_broken_pipe(self) -> None:
        with contextlib.suppress(SystemExit):  # rich's own, with another exit code
            Console.on_broken_pipe(self)
        raise SystemExit(EXIT_PIPE_CLOSED)
