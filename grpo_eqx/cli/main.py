"""The command `grpo-eqx`."""

import contextlib
import dataclasses
import difflib
import functools
import inspect
import io
import itertools
import operator
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from importlib.metadata import version
from typing import Annotated, Any, get_type_hints

import tyro

from grpo_eqx.cli.check import Check
from grpo_eqx.cli.compile import Compile
from grpo_eqx.cli.doctor import Doctor
from grpo_eqx.cli.eval import Eval
from grpo_eqx.cli.export import Export
from grpo_eqx.cli.flag_values import AS_SETTINGS
from grpo_eqx.cli.flags import ConfigFlags
from grpo_eqx.cli.help import asks_for_help, show_help
from grpo_eqx.cli.inspect import Inspect
from grpo_eqx.cli.plan import Plan
from grpo_eqx.cli.report import Report
from grpo_eqx.cli.serve import Serve
from grpo_eqx.cli.streams import clean_messages, standard_output
from grpo_eqx.cli.train import Train
from grpo_eqx.common.clean_text import print_clean
from grpo_eqx.common.errors import (
    EXIT_INTERRUPTED,
    EXIT_USER_ERROR,
    RunError,
    UserError,
    did_you_mean,
    listed,
    near,
)
from grpo_eqx.common.tracebacks import is_pythons, print_traceback, shortened
from grpo_eqx.launch import Launch
from grpo_eqx.launch.subcommand import CommandError, Group, Subcommand
from grpo_eqx.settings.unknown_names import advice_on_call

_SUBCOMMANDS: Mapping[str, type[Subcommand | Group]] = {
    "train": Train, "plan": Plan, "compile": Compile, "eval": Eval, "report": Report,
    "export": Export, "check": Check, "inspect": Inspect, "serve": Serve, "doctor": Doctor,
    "launch": Launch,
}  # fmt: skip
_ANY = functools.reduce(
    operator.or_,
    (Annotated[kind, tyro.conf.subcommand(name)] for name, kind in _SUBCOMMANDS.items()),
)
"""Union of the subcommands, for their common help."""
_OF_LAUNCHERS: Mapping[str, str] = {
    "nproc_per_node": "use --processes.",
    "num_processes": "use --processes.",
    "nnodes": "use --processes.",
    "max_restarts": "use --restarts.",
}
"""Flags of other launchers, and what to use instead."""
_ABOUT = "GRPO in JAX, from a laptop to a TPU pod. --version prints the version."


def main() -> None:
    """Runs the subcommand that the command line names, and exits with its exit code.

    Everything after the first `--` is a command for the subcommand to run, left unchanged.
    """
    if is_pythons(sys.excepthook):  # a hook that someone else set stays
        sys.excepthook = shortened(print_traceback, advice_on_call)
    try:
        with standard_output(), clean_messages():
            code = run(sys.argv[1:])
        sys.exit(code)
    except UserError as error:
        print_clean(f"error: {near(str(error))}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)
    except (CommandError, RunError) as error:
        print_clean(f"error: {near(str(error))}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


def run(arguments: Sequence[str]) -> int:
    """Runs the subcommand that the arguments name, and returns its exit code."""
    own = list(arguments)
    command: list[str] = []
    if "--" in own:
        end = own.index("--")
        own, command = own[:end], own[end + 1 :]
    if own[-1:] == ["--version"] and "tpu-vm" not in own:  # whose --version is the software's
        print_clean(f"grpo_eqx {version('grpo_eqx')}")
        return 0
    if own[:1] == ["launch"] and not command and (start := _program(own)) is not None:
        raise UserError(f"-- is missing before {own[start]}: put it before the command to run.")
    if not own or (own[0] not in _SUBCOMMANDS and not asks_for_help(own[:1])):
        raise UserError(_about_no_subcommand(own[0] if own else "", _SUBCOMMANDS))
    chosen = _parsed(_SUBCOMMANDS[own[0]], own) if own[0] in _SUBCOMMANDS else _cli(_ANY, own)
    while isinstance(chosen, Group):
        chosen = chosen.chosen
    _check(chosen, command)
    return chosen.run(tuple(command))


def _program(arguments: Sequence[str]) -> int | None:
    """Returns the place where a command seems to start, in arguments without `--`."""
    programs = re.compile(r"(.*/)?(python[\d.]*|grpo-eqx|bash|sh|torchrun)|.*\.(py|sh)")
    return next(
        (
            i
            for i, (before, each) in enumerate(itertools.pairwise(arguments), start=1)
            if programs.fullmatch(each) and not before.startswith("-")  # else a flag's value
        ),
        None,
    )


def _parsed(kind: type[Subcommand | Group], arguments: Sequence[str]) -> Subcommand | Group:
    """Returns the subcommand that arguments describe; the first argument is its name."""
    if not issubclass(kind, ConfigFlags):
        if not issubclass(kind, Group):
            _refuse_unknown(kind, arguments)
        return _cli(kind, arguments[1:], tyro.conf.FlagCreatePairsOff, name=arguments[0])
    _help_or_refuse(kind, arguments)
    with AS_SETTINGS:
        default = kind.defaults_for(arguments[1:])
        return _cli(kind, arguments[1:], name=arguments[0], default=default)


def _refuse_unknown(kind: type[Subcommand], arguments: Sequence[str]) -> None:
    """Rejects unknown flags of a subcommand, for which the parser has other messages."""
    assert dataclasses.is_dataclass(kind)
    hints = get_type_hints(kind, include_extras=True)
    by_place = [name for name, hint in hints.items() if "Positional" in str(hint)]
    names = [field.name for field in dataclasses.fields(kind) if field.name not in by_place]
    known = ["--help", *(f"--{name.replace('_', '-')}" for name in names)]
    command, answers = f"grpo-eqx {arguments[0]}", []
    for argument in arguments[1:]:
        flag = argument.partition("=")[0].replace("_", "-")
        if flag.startswith("--") and flag[2:] in by_place:
            by_itself = f"{command} {flag[2:].upper()}"
            answers.append(f"{flag[2:]} has no flag: give it by itself, as in {by_itself}.")
        elif flag.startswith("--") and flag not in known:
            answers.append(_unknown_flag(flag, command, known))
    if answers:
        raise UserError(" ".join(answers))


def _cli(kind: Any, arguments: Sequence[str], *config: Any, name: str = "", **options: Any) -> Any:
    parse = functools.partial(
        tyro.cli,
        kind,
        prog=f"grpo-eqx {name}".strip(),
        description=None if name else _ABOUT,
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes, *config),
        **options,
    )
    said, shown = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return parse(args=arguments)
    except SystemExit:
        if not said.getvalue():  # the help
            raise
        words = itertools.takewhile(lambda word: not word.startswith("-"), arguments)
        with contextlib.suppress(SystemExit), contextlib.redirect_stdout(shown):
            parse(args=[*words, "--help"])
        raise UserError(_in_a_sentence(said.getvalue(), shown.getvalue())) from None


def _in_a_sentence(box: str, help_text: str) -> str:
    """Returns the parser's complaint about a command, which is in a box, as a sentence."""
    usage = re.search(r"usage: (.+?) \[-h\](?: \{(.+?)\})?", " ".join(help_text.split()))
    assert usage is not None
    command, subcommands = usage[1], usage[2].split(",") if usage[2] else []
    flags = re.findall(r"(?m)^[│ ] *(--[a-z0-9-]+)", help_text)
    lines = [line.strip("╭╮╰╯│─ ") for line in box.splitlines()[1:]]
    text = " ".join(line for line in lines if line.strip("-"))
    complaint = re.split(r"Argument helptext|For full helptext", text)[0].strip(" .")
    # "or misplaced" if another subcommand has the flag.
    found = re.search(r"Unrecognized (?:or misplaced )?options:(.*)", complaint)
    unknown = [word.rstrip(",") for word in found[1].split()] if found else []
    if unknown and subcommands:
        return _about_no_subcommand(unknown[0].partition("=")[0], subcommands)
    if unknown and unknown[0].startswith("-"):
        return _unknown_flag(unknown[0].partition("=")[0], command, flags)
    if complaint.startswith("Expected one of"):
        return _about_no_subcommand("", subcommands)
    if complaint.startswith("Missing from"):
        # Names of arguments are less indented than their help.
        about = re.split("Unrecognized|For full helptext", box)[0]
        named = re.findall(r"(?m)^[│ ] {5}((?:--)?[\w-]+)", about)
        complaint = f"{listed(named)} {'is' if len(named) == 1 else 'are'} missing"
        if unknown:
            complaint += f", and {unknown[0]} belongs to no flag"
    elif unknown:
        complaint = f"{unknown[0]} belongs to no flag"
    return f"{complaint}; {command} --help says more."


def _unknown_flag(flag: str, command: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(flag, known, n=1)
    guess = f"did you mean {near[0]}?" if near else f"{command} --help lists all."
    fix = _OF_LAUNCHERS.get(flag.lstrip("-").replace("-", "_"), guess)
    return f"{flag} is not a flag of {command}: {fix}"


def _about_no_subcommand(word: str, subcommands: Collection[str]) -> str:
    known = ", ".join(subcommands)
    if not word:
        return f"a subcommand is missing: use one of {known}."
    if word.startswith("-"):
        return f"{word} comes before the subcommand ({known}): put flags after it."
    return f"there is no subcommand {word!r}: use one of {known}{did_you_mean(word, subcommands)}."


def _help_or_refuse(kind: type[ConfigFlags], arguments: Sequence[str]) -> None:
    """Shows the help on a run's flags, or rejects invalid flags."""
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
