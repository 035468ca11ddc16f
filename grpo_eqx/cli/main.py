"""The command `grpo-eqx`."""

import contextlib
import inspect
import os
import select
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Annotated, Any

import tyro

from grpo_eqx.cli.doctor import Doctor
from grpo_eqx.cli.export import Export
from grpo_eqx.cli.flag_values import AS_SETTINGS
from grpo_eqx.cli.flags import ConfigFlags
from grpo_eqx.cli.help import asks_for_help, show_help
from grpo_eqx.cli.plan import Plan
from grpo_eqx.cli.train import Train
from grpo_eqx.errors import EXIT_INTERRUPTED, EXIT_PIPE_CLOSED, EXIT_USER_ERROR, RunError, UserError
from grpo_eqx.launch import Launch
from grpo_eqx.launch.subcommand import CommandError, Group, Subcommand

_RUN_COMMANDS: Mapping[str, type[ConfigFlags]] = {"train": Train, "plan": Plan}


def main() -> None:
    """Runs the subcommand that the command line names, and exits with its exit code.

    Everything after the first `--` is a command for the subcommand to run, left unchanged.
    """
    try:
        code = run(sys.argv[1:])
        sys.stdout.flush()
        sys.exit(code)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)
    except (CommandError, RunError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:
        if not _output_is_closed():
            raise
        sys.exit(EXIT_PIPE_CLOSED)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


def _output_is_closed() -> bool:
    """Returns whether nobody reads standard output, as in `... | head`; then drops the rest."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    closed = any(event & select.POLLERR for _, event in poll.poll(0))
    if closed:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return closed


def run(arguments: Sequence[str]) -> int:
    """Runs the subcommand that the arguments name, and returns its exit code."""
    own = list(arguments)
    if own == ["--version"]:
        print(f"grpo_eqx {version('grpo_eqx')}")
        return 0
    command: list[str] = []
    if "--" in own:
        end = own.index("--")
        own, command = own[:end], own[end + 1 :]
    of_run = _RUN_COMMANDS.get(own[0]) if own else None
    if of_run is not None:
        _help_or_refuse(of_run, own)
    config = [tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes]
    if of_run is None:
        config.append(tyro.conf.FlagCreatePairsOff)
    with contextlib.nullcontext() if of_run is None else AS_SETTINGS:
        chosen: Subcommand | Group = tyro.cli(
            _any_subcommand(own),
            prog="grpo-eqx",
            description="GRPO in JAX, from a laptop to a TPU pod. --version prints the version.",
            args=own,
            config=config,
        )
    while isinstance(chosen, Group):
        chosen = chosen.chosen
    _check(chosen, command)
    return chosen.run(tuple(command))


def _any_subcommand(arguments: Sequence[str]) -> Any:
    """Returns the union type of the subcommands, with the defaults of a recipe or a file."""
    train, plan = Train.defaults_for(arguments), Plan.defaults_for(arguments)
    return (
        Annotated[Train, tyro.conf.subcommand("train", default=train)]
        | Annotated[Plan, tyro.conf.subcommand("plan", default=plan)]
        | Annotated[Export, tyro.conf.subcommand("export")]
        | Annotated[Doctor, tyro.conf.subcommand("doctor")]
        | Annotated[Launch, tyro.conf.subcommand("launch")]
    )


def _help_or_refuse(kind: type[ConfigFlags], arguments: Sequence[str]) -> None:
    """Shows the help on a run's flags, or refuses what cannot be one of them."""
    if asks_for_help(arguments):
        show_help(kind, f"grpo-eqx {arguments[0]}", inspect.getdoc(kind) or "", arguments[1:])
    kind.check(arguments[1:])


def _check(subcommand: Subcommand, command: Sequence[str]) -> None:
    if subcommand.takes_command and not command:
        raise UserError("COMMAND is missing: give one after --, as in -- python train.py.")
    if command and not subcommand.takes_command:
        raise UserError(
            f"this subcommand takes no COMMAND, but got {command[0]!r}: remove -- and all after it."
        )
    if command and (not command[0] or command[0].startswith("-")):
        raise UserError(f"COMMAND starts with {command[0]!r}: it must start with a program.")


if __name__ == "__main__":
    main()
