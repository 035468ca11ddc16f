"""Values of flags, converted and rejected like the values in config files."""

import itertools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from grpo_eqx.common.errors import UserError
from grpo_eqx.settings.types import as_one_of
from grpo_eqx.settings.unknown_names import advice

AS_SETTINGS = ConstructorRegistry()
"""Makes tyro convert values like settings, while it is entered; invalid values stay strings.

The config then rejects these strings with the same message as in Python and files.
"""
_FLAG = re.compile(r"--\w[\w-]*(?==|$)")
_ASSIGNMENT = re.compile(r"[+~]*([A-Za-z_][\w.]*)=(.*)")


@AS_SETTINGS.primitive_rule
def _as_setting(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    if info.type is bool or not is_of_setting(info.type):
        return None
    parts = _parts(info.type)
    many = any(get_origin(part) is tuple for part in parts)

    def value(typed: list[str]) -> Any:
        given = tuple(typed) if many and typed != ["None"] else typed[0]
        try:
            return as_one_of(parts, given)[0]
        except ValueError:
            return given

    def shown(default: Any) -> list[str]:
        return [str(each) for each in default] if isinstance(default, tuple) else [str(default)]

    return PrimitiveConstructorSpec(
        nargs="*" if many else 1,
        metavar="TEXT",
        instance_from_str=value,
        is_instance=lambda _: True,
        str_from_instance=shown,
    )


def is_of_setting(kind: Any) -> bool:
    """Returns whether a type is a type of settings; types of subcommands are not."""
    if len(parts := _parts(kind)) > 1:
        return all(map(is_of_setting, parts))
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    plain = bool, int, float, str, Path, NoneType
    return kind in plain or get_origin(kind) in (Literal, tuple, Mapping)


def _parts(kind: Any) -> tuple[Any, ...]:
    """Returns the parts of a union, or the type itself."""
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def refuse_dashes(arguments: Sequence[str]) -> None:
    """Raises `UserError` for a value that would be read as a flag."""
    for before, argument in itertools.pairwise(["", *arguments]):
        if argument.startswith("--") and not _FLAG.match(argument):
            example = before if _FLAG.fullmatch(before) else "--FLAG"
            raise UserError(
                f"{argument!r} starts with dashes: write {example}={argument!r} where it is a "
                f"value, or put it in a file for --config."
            )


def refuse_assignments(arguments: Sequence[str], known: Collection[str]) -> None:
    """Raises `UserError` for settings without dashes, in Hydra's style.

    **Arguments:**

    - `arguments`: the command line.
    - `known`: names of flags, without dashes.
    """
    answers, flag = list[str](), ""
    for before, argument in itertools.pairwise(["", *arguments]):
        flag = argument if argument.startswith("--") else flag
        match = _ASSIGNMENT.fullmatch(argument)
        if match is None or (before.startswith("--") and "=" not in before):
            continue
        if flag.replace("_", "-") == "--chat-template-kwargs":  # which takes assignments
            continue
        name, value = match.groups()
        meant = name.rpartition(".")[2].replace("_", "-")
        answer = advice(name) or "flags start with --"
        if meant in known:
            answer = f"write --{meant} {value}"
        answers.append(f"{argument!r} is not a flag: {answer}.")
    if answers:
        raise UserError(" ".join(answers))


def check_complete(
    arguments: Sequence[str],
    placeholders: Mapping[str, str],
    wanted: Callable[[str], str] = lambda flag: "give one after it",
) -> None:
    """Raises `UserError` for a flag without its value, and for a value without its flag.

    **Arguments:**

    - `arguments`: the command line.
    - `placeholders`: placeholders of values, by the names of flags without dashes: empty for a
      switch, and ending with `...` for several values.
    - `wanted`: returns the advice for a flag whose value is missing.
    """
    flag, awaited, several = None, False, False
    lists: set[str] = set()
    for argument in arguments:
        if not argument.startswith("--"):
            if not awaited and not several:
                raise UserError(_about_stray(argument, flag, placeholders))
            awaited = False
            continue
        if awaited:
            break
        name, equals, value = argument[2:].partition("=")
        flag = name.replace("_", "-")
        expected = placeholders.get(flag, "")
        if equals and not expected and flag in placeholders:
            raise UserError(_about_stray(value, flag, placeholders))
        unknown = flag.removeprefix("no-") not in placeholders  # another check rejects it
        several = (expected.endswith("...") and not equals) or unknown
        awaited = bool(expected) and not several and not equals
        if expected.endswith("...") and flag in lists:
            raise UserError(f"--{flag} is given twice: give all values after one.")
        lists.add(flag)
    if awaited and flag is not None:
        raise UserError(f"--{flag} has no value: {wanted(flag)}.")


def _about_stray(value: str, flag: str | None, placeholders: Mapping[str, str]) -> str:
    if flag is None:
        use = f", or use --config {value}" if value.endswith((".yaml", ".yml", ".json")) else ""
        return f"{value!r} is not a flag: flags start with --{use}."
    if placeholders.get(flag, "").endswith("..."):  # a single value after an equals sign
        return f"--{flag}=... takes one value: for several, write --{flag} A B, without the =."
    if flag in ("data", "eval-data"):
        return f"--{flag} takes one file: join several, as cat A.jsonl B.jsonl > C.jsonl does."
    if flag == "mesh":
        return "--mesh takes one value: join the sizes with commas, as in --mesh 1,-1,1."
    if placeholders.get(flag):
        return f"--{flag} takes one value: leave out {value!r}, or quote all of it."
    if value.lower() in ("false", "no", "off", "0", "none"):
        return f"--{flag} takes no value: leave it out, or use --no-{flag}."
    return f"--{flag} takes no value: leave out {value!r}."
