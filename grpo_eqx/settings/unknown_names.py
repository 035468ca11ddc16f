"""Answers to names that do not exist here, with what to use instead."""

import difflib
import functools
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml

from grpo_eqx.common.errors import UserError, first_line
from grpo_eqx.settings.config import GRPOConfig

Table = Literal[
    "settings", "prefixes", "arguments of GRPOTrainer", "arguments of functions",
    "events of callbacks",
]  # fmt: skip
_REFUSED = re.compile(
    r"([\w.<>]+)\(\) got an unexpected keyword argument '(.+?)'(?:\. Did you mean '(\w+)')?"
)
"""Python's error on an argument that a function does not have."""
_SAME_IN_TRANSFORMERS = "from_pretrained", "save_pretrained"
"""Functions of `grpo_eqx.models` that transformers has as methods, with more arguments."""


@functools.cache
def names_of_others(table: Table) -> Mapping[str, str]:
    """Returns the answers of a table of `unknown_names.yaml`, by name."""
    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    answers = yaml.safe_load(text)[table]
    return {name: answer for answer, names in answers.items() for name in names}


def advice(name: str) -> str | None:
    """Returns what to do instead of a setting that another library has, if that is known."""
    key = _key(name)
    if key in names_of_others("settings"):
        return names_of_others("settings")[key]
    prefixes = names_of_others("prefixes")
    return next((text for start, text in prefixes.items() if key.startswith(start)), None)


def _key(name: str) -> str:
    """Returns the longest end of a dotted name that has advice of its own, else its last part."""
    *_, section, last = ["", *name.split(".")]  # as in rollout.name
    known = names_of_others("settings")
    return next((key for key in (name, f"{section}.{last}") if key in known), last)


def refuse_unknown(names: Iterable[str], known: Collection[str]) -> None:
    """Raises `UserError` for names that are not known settings."""
    answers = [_unknown(name, known) for name in dict.fromkeys(names) if name not in known]
    if answers:
        raise UserError(" ".join(answers))


def _unknown(name: str, known: Collection[str]) -> str:
    instead = advice(name) or _guess(name, known)
    if instead is None:
        instead = "grpo-eqx train --help-all lists all settings"
    return f"{name} is an unknown setting: {_as_sentence(instead)}"


def _as_sentence(text: str) -> str:
    return text if text[-1] == "?" else f"{text}."


def _guess(name: str, known: Collection[str]) -> str | None:
    """Returns what to do instead of a name that is close to one of ours, or of another library."""
    of_ours = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    started = [each for each in known if each.startswith(f"{name}_")]
    if not of_ours and len(started) == 1:
        return f"did you mean {started[0]}?"
    # Advice for another name than was meant would mislead.
    others = names_of_others("settings")
    of_others = difflib.get_close_matches(name, others, n=1, cutoff=0.9)
    near = difflib.get_close_matches(name, [*of_ours, *of_others], n=1, cutoff=0.7)
    if not near:
        return None
    return f"did you mean {near[0]}?" + ("" if near[0] in known else f" {others[near[0]]}")


def advice_on_call(error: BaseException) -> str | None:
    """Returns what to write instead of an argument that a call of this package has refused.

    `GRPOConfig`, `GRPOTrainer` and its methods are plain: they refuse unknown arguments with
    Python's `TypeError`. Returns `None` for other errors.
    """
    refused = _REFUSED.match(first_line(error)) if isinstance(error, TypeError) else None
    if refused is None:
        return None
    called, name, guess = refused.groups()
    owner, _, function = called.rpartition(".")
    configs = {kind.__qualname__: kind for kind in _configs(GRPOConfig)}
    if function == "__init__" and owner in configs:
        return _unknown(name, configs[owner].__dataclass_fields__)
    if called == "GRPOTrainer.__init__":
        function, instead = "GRPOTrainer", _instead_of_argument(name)
    elif owner == "GRPOTrainer" or called in _SAME_IN_TRANSFORMERS:
        instead = names_of_others("arguments of functions").get(name)
    else:
        return None
    if instead is None:
        instead = "its docstring lists all" if guess is None else f"did you mean {guess}?"
    return f"{function} has no argument {name}: {_as_sentence(instead)}"


def _configs(kind: type[GRPOConfig]) -> list[type[GRPOConfig]]:
    """Returns a class of config with all its subclasses."""
    return [kind, *(each for below in kind.__subclasses__() for each in _configs(below))]


def _instead_of_argument(name: str) -> str | None:
    """Returns what to use instead of an argument that `GRPOTrainer` does not have, if known."""
    if name in GRPOConfig.__dataclass_fields__:
        return f"it is a setting: GRPOConfig({name}=...)"
    if (of_config := advice(name)) is not None:
        of_config = f"it is none of the settings either; {of_config}"
    return names_of_others("arguments of GRPOTrainer").get(name, of_config)


_ALSO_SECTIONS = frozenset({"data", "model", "optim", "optimizer"})
"""Names of settings that are sections in other libraries' files."""


def _is_section(name: str, value: Mapping[Any, Any], known: Collection[str]) -> bool:
    """Returns whether a dict is a group of settings, and no value of one."""
    if name in _ALSO_SECTIONS:
        return any(inner in known or advice(str(inner)) for inner in value)
    return name not in known and advice(name) is None


def refuse_sections(settings: Mapping[str, Any], known: Collection[str]) -> None:
    """Raises `UserError` for settings in groups, which also says what is wrong with their names."""
    sections, names = list[str](), list[str]()
    left = list(settings.items())
    while left:
        path, value = left.pop(0)
        name = _key(path)
        if isinstance(value, Mapping) and _is_section(name, value, known):
            sections.append(name)
            left += [(f"{name}.{inner}", x) for inner, x in value.items()]
        else:
            names.append(name)
    if not sections:
        return
    answer = f"there are no sections: write what is in {', '.join(sections)} at the top level."
    try:
        refuse_unknown(names, known)
    except UserError as error:
        answer += f" {error}"
    raise UserError(answer)
