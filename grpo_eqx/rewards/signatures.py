"""Checks that reward functions can be called with the problems' columns."""

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from grpo_eqx.common.errors import UserError, did_you_mean
from grpo_eqx.rewards.limits import is_plain
from grpo_eqx.rewards.outcomes import ENVIRONMENTS

_ALWAYS = "prompts", "completions", "completion_ids"
_OTHERWISE = {
    "question": "the questions are its prompts",
    "prompt": "the prompts of all completions are its prompts, a list",
    ENVIRONMENTS: (
        "pass environment_factory to GRPOTrainer, and leave reward_workers at 0 or write the "
        "function as async def"
    ),
}
"""Arguments that people expect, and where to find their values."""
_OF_TRL = "trainer_state", "log_extra", "log_metric"
"""Arguments that TRL passes, and grpo_eqx does not."""


def check_signatures(
    funcs: Mapping[str, Callable[..., Any]],
    columns: Collection[str],
    *,
    environments: bool = False,
    workers: int = 0,
) -> None:
    """Raises `UserError` for a function that cannot be called with the problems' columns by name.

    **Arguments:**

    - `funcs`: the functions by name.
    - `columns`: the columns of the problems.
    - `environments`: whether completions have environments, which functions get, too.
    - `workers`: number of workers, which call plain functions, without environments.
    """
    for name, func in funcs.items():
        if inspect.isclass(func):
            raise UserError(f"reward function {name} is a class: pass an object of it, {name}().")
        if (parameters := _parameters_of(func)) is not None:
            are_passed = environments and not (workers and is_plain(func))
            _check(name, parameters, [*columns, *[ENVIRONMENTS] * are_passed])


def note_on_unpassed(
    funcs: Mapping[str, Callable[..., Any]], columns: Collection[str]
) -> str | None:
    """Returns a note on functions with parameters that only TRL passes, or `None`.

    **Arguments:**

    - `funcs`: the functions by name.
    - `columns`: the columns of the problems.
    """
    wanted = set(_OF_TRL) - set(columns)
    found = [
        f"{each.name} to {name}"
        for name, func in funcs.items()
        for each in _parameters_of(func) or ()
        if each.name in wanted
    ]
    if not found:
        return None
    return (
        f"note: TRL would pass {', '.join(found)}, and grpo_eqx does not: to log a figure, return "
        f"it from a reward function of weight 0."
    )


def _parameters_of(func: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """Returns the parameters of a function; `None` for a function in C without a signature."""
    try:
        return list(inspect.signature(func, follow_wrapped=False).parameters.values())
    except (TypeError, ValueError):
        return None


def _missing(wanted: str, columns: Collection[str]) -> str:
    """Describes an argument that functions are not called with, and the available columns."""
    if wanted in _OTHERWISE:
        return f"{wanted}, which it does not get: {_OTHERWISE[wanted]}"
    has = f"they have {', '.join(columns)}" if columns else "they have none"
    guess = did_you_mean(wanted, {*_ALWAYS, *columns}, cutoff=0.75)
    return f"the column {wanted}, which the problems do not have: {has}{guess}"


def _check(name: str, parameters: list[inspect.Parameter], columns: Collection[str]) -> None:
    by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    given = {*_ALWAYS, *columns}
    if nameless := [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]:
        raise UserError(
            f"reward function {name} takes {nameless[0]} by position only, and arguments are "
            f"passed by name: remove the / from its signature."
        )
    needed = [p.name for p in by_name if p.default is p.empty and p.name not in given]
    if of_trl := [name for name in needed if name in _OF_TRL]:
        raise UserError(
            f"reward function {name} takes {', '.join(of_trl)}, which TRL passes, and grpo_eqx "
            f"does not: remove it from the function; what it returns is logged under its name, and "
            f"a Tracker gets all metrics."
        )
    if needed:
        raise UserError(f"reward function {name} asks for {_missing(needed[0], columns)}.")
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    if rest := [each for each in given if each not in {p.name for p in by_name}]:
        raise UserError(
            f"reward function {name} does not take {', '.join(sorted(rest))}: add **columns to its "
            f"arguments."
        )
