"""Checks that reward functions can be called with the problems' columns."""

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from grpo_eqx.common.errors import UserError, did_you_mean
from grpo_eqx.rewards.limits import is_plain
from grpo_eqx.rewards.logged import OF_TRAINING
from grpo_eqx.rewards.outcomes import ENVIRONMENTS

_ALWAYS = "prompts", "completions", "completion_ids"
_NOT_IN_WORKERS = "leave reward_workers at 0 or write the function as async def"
_OTHERWISE = {
    "question": "the questions are its prompts",
    "prompt": "the prompts of all completions are its prompts, a list",
    ENVIRONMENTS: "pass environment_factory to GRPOTrainer",
}
"""Arguments that people expect, and where to find their values."""
_NOT_IN_EVALUATIONS = (
    "functions of evaluations cannot log; give the argument a default, such as None, to use the "
    "function there too"
)


def check_signatures(
    funcs: Mapping[str, Callable[..., Any]],
    columns: Collection[str],
    *,
    environments: bool = False,
    workers: int = 0,
    in_training: bool = False,
) -> None:
    """Raises `UserError` for a function that cannot be called with the problems' columns by name.

    **Arguments:**

    - `funcs`: the functions by name.
    - `columns`: the columns of the problems.
    - `environments`: whether completions have environments, which functions get, too.
    - `workers`: number of workers, which call plain functions, without environments and
      `OF_TRAINING`.
    - `in_training`: whether functions reward completions of training, and not of an evaluation.
    """
    called = "reward function" if in_training else "function of evaluations"
    for name, func in funcs.items():
        if inspect.isclass(func):
            raise UserError(f"{called} {name} is a class: pass an object of it, {name}().")
        if (parameters := _parameters_of(func)) is not None:
            is_here = not (workers and is_plain(func))
            given = [*columns, *[ENVIRONMENTS] * (environments and is_here)]
            unpassed = dict[str, str]()
            if not in_training:
                unpassed = dict.fromkeys(OF_TRAINING, _NOT_IN_EVALUATIONS)
            elif not is_here:
                unpassed = dict.fromkeys(OF_TRAINING, _NOT_IN_WORKERS)
            if environments and not is_here:
                unpassed[ENVIRONMENTS] = _NOT_IN_WORKERS
            _check(f"{called} {name}", parameters, given, unpassed)


def named_of_training(func: Callable[..., Any]) -> frozenset[str]:
    """Returns which arguments of `OF_TRAINING` a function names."""
    return frozenset(each.name for each in _parameters_of(func) or ()) & {*OF_TRAINING}


def _parameters_of(func: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """Returns the parameters of a function; `None` for a function in C without a signature."""
    try:
        return list(inspect.signature(func, follow_wrapped=False).parameters.values())
    except (TypeError, ValueError):
        return None


def _missing(wanted: str, columns: Collection[str], unpassed: Mapping[str, str]) -> str:
    """Describes an argument that functions are not called with, and the available columns."""
    if (why := {**_OTHERWISE, **unpassed}.get(wanted)) is not None:
        return f"{wanted}, which it does not get: {why}"
    own = [name for name in columns if name != ENVIRONMENTS]
    has = f"they have {', '.join(own)}" if own else "they have none"
    guess = did_you_mean(wanted, {*_ALWAYS, *columns}, cutoff=0.75)
    return f"the column {wanted}, which the problems do not have: {has}{guess}"


def _check(
    name: str,
    parameters: list[inspect.Parameter],
    columns: Collection[str],
    unpassed: Mapping[str, str],
) -> None:
    """Checks the parameters of a function; `unpassed` has why arguments are not passed to it."""
    by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    given = {*_ALWAYS, *columns}
    if nameless := [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]:
        raise UserError(
            f"{name} takes {nameless[0]} by position only, and arguments are "
            f"passed by name: remove the / from its signature."
        )
    known = given | ({*OF_TRAINING} - {*unpassed})
    needed = [p.name for p in by_name if p.default is p.empty and p.name not in known]
    if needed:
        missing = _missing(needed[0], columns, unpassed)
        raise UserError(f"{name} asks for {missing}.")
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    if rest := [each for each in given if each not in {p.name for p in by_name}]:
        raise UserError(
            f"{name} does not take {', '.join(sorted(rest))}: add **columns to its arguments."
        )
