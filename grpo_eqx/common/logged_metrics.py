"""Checks of the metrics that a user's code logs besides those of the run."""

from collections.abc import Collection
from typing import Any

from grpo_eqx.common.clean_text import is_name
from grpo_eqx.common.errors import UserError, shown

_OF_ROWS = "step", "step_time"
"""Names by which a line of metrics is known as a step's."""


def metric_value(who: str, name: object, value: Any) -> float:
    """Returns the value of a metric; raises `UserError` where it or its name cannot be recorded.

    **Arguments:**

    - `who`: what logs it, for messages.
    - `name`, `value`: its name and its value.
    """
    if not is_name(name):
        what = "of characters that can be printed" if isinstance(name, str) else "that is a text"
        raise UserError(f"{who} logs a metric with the name {shown(name)}: give it a name {what}.")
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise UserError(f"{who} logs {name!r} as {shown(value)}: metrics are numbers.") from error


def check_unused(who: str, name: str, others: Collection[str], *, of_step: bool) -> None:
    """Raises `UserError` for the name of a metric that the run needs for itself.

    **Arguments:**

    - `who`: what logs it, for messages.
    - `name`: its name.
    - `others`: names of the metrics that are recorded with it.
    - `of_step`: whether they are a step's.
    """
    if name in _OF_ROWS or (of_step and name.startswith("eval/")):
        raise UserError(
            f"{who} logs {name!r}, a name by which lines of steps and of evaluations are told "
            f"apart: choose another."
        )
    if name in others:
        raise UserError(f"{who} logs {name!r}, which the run logs already: choose another name.")
