"""The error for a name that no metric of a run has."""

import difflib
from collections.abc import Iterable

from grpo_eqx.common.errors import UserError

_MAIN_OF_EVALUATIONS = "eval/greedy/pass@1"
_MOST = 12
"""Names that a message lists."""


def unknown_metric(what: str, name: str, why: str, known: Iterable[str]) -> UserError:
    """Returns the error for an unknown metric, with the names that may be meant.

    **Arguments:**

    - `what`: what has the name.
    - `name`, `why`: the name, and why there is no such metric.
    - `known`: the metrics that exist.
    """
    names, default = sorted(set(known)), list[str]()
    if name.startswith("eval"):  # as TRL's eval_reward, which is not the reward of training
        names = [each for each in names if each.startswith("eval/")]
        default = [each for each in names if each == _MAIN_OF_EVALUATIONS]
    likely = difflib.get_close_matches(name, names, n=1) or default
    if not names:
        return UserError(f"{what} is {name!r}, {why}: set eval_steps.")

    def likeness(each: str) -> float:
        return difflib.SequenceMatcher(None, name, each).ratio()

    guess = f" (did you mean {likely[0]}?)" if likely else ""
    listed = ", ".join(sorted(sorted(names, key=likeness, reverse=True)[:_MOST]))
    more = f", or of {len(names) - _MOST} others (docs: Metrics)" if len(names) > _MOST else ""
    return UserError(f"{what} is {name!r}, {why}{guess}: use one of {listed}{more}.")
