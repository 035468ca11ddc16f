"""Rule on groups whose rewards are all equal."""

import math
from collections.abc import Iterator
from statistics import fmean

from grpo_eqx.tracking.diagnosis.history import History
from grpo_eqx.tracking.diagnosis.rewards import constant
from grpo_eqx.tracking.diagnosis.rule import Rule, Seen

_MOST = 0.9
"""Share of groups without variance. DAPO (arXiv 2503.14476, section 3.2) replaces such groups,
because they have no gradient. Above this share, a step learns from less than a tenth of its batch.
Healthy runs on problems that are half solved have 0.3 to 0.6."""
_GROUPS = 80
"""Fewest groups for a meaningful share."""
_NOISE = 1.5
"""Standard errors above `_MOST`: pairs of completions may well be equal in 0.8 of all groups."""
_STEPS = 5
"""Fewest steps of these groups."""
_AT_START = 3
"""Steps for the reward at the start, and for the reward now."""
_FALL = 0.5
"""Fall of the reward that counts as a collapse, in standard deviations of single rewards."""
_COLLAPSED = (
    "Lower learning_rate, and start again or from a checkpoint before the fall: the policy has "
    "collapsed."
)
_COLD = 0.5
"""Sampling temperature below which equal completions are likely."""


def without_variance(history: History) -> Iterator[Seen]:
    if not history.newest("frac_reward_zero_std") >= _MOST:
        return
    count = _steps(history)
    shares = history.last("frac_reward_zero_std", count)
    noise = _NOISE * math.sqrt(_MOST * (1 - _MOST) / (count * max(history.prompts, 1)))
    if len(shares) < count or (share := fmean(shares)) < _MOST + noise:
        return
    if _is_constant(history, min(count, len(history.steps))):
        return  # the rules on constant rewards say more
    reward = fmean(history.last("reward", count) or [0.0])
    if history.is_solved(count):
        yield Seen(
            f"Nearly all problems are solved, as far as the rewards say: in {share:.0%} of the "
            f"groups of {history.span(count)} all rewards were equal, and the mean reward "
            f"({reward:.3g}) is at its best. Nothing is left to learn from these problems.",
            "End the run here, or go on with harder problems.",
            subject="solved",
            kind="note",
        )
        return
    before = _before(history)
    yield Seen(
        f"In {share:.0%} of the groups of {history.span(count)} all rewards were equal (the mean "
        f"reward was {reward:.3g}{before}): they have advantage 0, and teach nothing.",
        _advice(history) if not before else _COLLAPSED,
    )


def _steps(history: History) -> int:
    return history.window_of(_GROUPS, history.prompts, _STEPS)


def _is_constant(history: History, count: int) -> bool:
    """Returns whether all rewards are equal, and each function scored in every step.

    Of functions that did not, as those of environments that take turns, no other rule tells it.
    """
    means = [history.last(f"rewards/{func}/mean", count) for func in history.reward_funcs]
    scored = all(len(values) == count for values in means)
    return scored and constant(history, "reward", count) is not None


def _before(history: History) -> str:
    """Returns words on the reward at the start, if it was far higher."""
    now = fmean(history.last("reward", _AT_START) or [0.0])
    early = max(history.first("reward", _AT_START), default=now)
    deviation = max(history.first("reward_std", _AT_START), default=0.0)
    return f", and {early:.3g} at the start" if early - now > _FALL * deviation > 0 else ""


def _advice(history: History) -> str | None:
    temperature = float(history.setting("temperature", 1.0))
    if temperature < _COLD:
        return (
            f"Raise temperature ({temperature:g}): the completions of a group are nearly the same."
        )
    if history.setting("dynamic_sampling", False):
        return "Choose problems that the model solves sometimes: dynamic_sampling finds too few."
    return None


WITHOUT_VARIANCE = Rule(
    name="groups_without_variance",
    metric="frac_reward_zero_std",
    symptom="In more than 90 % of the groups, beyond chance, all rewards are equal "
    "(`frac_reward_zero_std`), over 80 groups and at least five steps. It is only noted where the "
    "reward is at its best, and its standard deviation at most half of that at the start: nearly "
    "all problems are solved.",
    cause="The problems are too easy or too hard, groups are too small, the temperature is low, "
    "or the policy has collapsed.",
    advice="Choose problems that the model solves sometimes; raise num_generations; or turn "
    "dynamic_sampling on, which replaces such groups.",
    look=without_variance,
    steps=_steps,
)
