"""Rule on evaluations beside the reward."""

import math
from collections.abc import Iterator
from statistics import fmean
from typing import NamedTuple

from grpo_eqx.tracking.diagnosis.history import History, finite
from grpo_eqx.tracking.diagnosis.rule import Rule, Seen

_NOISE = 3.0
"""Fall in standard errors of the difference of two evaluations, computed as if they had different
problems. On the same problems, chance explains less, even for the best of twenty evaluations."""
_LEAST_FALL = 0.05
"""Smallest fall that matters, for any number of problems."""
_FEW_PROBLEMS = 100
"""Assumed problems of an evaluation that does not record their number."""
_LEAST_PROBLEMS = 8
"""Fewest problems of a meaningful evaluation: three of three may be correct by chance."""
_WINDOW = 5
_OF_BOTH = (
    "Go back to the checkpoint of the best evaluation, and lower learning_rate: the reward fell as "
    "well."
)


def falls(history: History) -> Iterator[Seen]:
    if len(history.evaluations) < 2 or not history.steps:
        return
    newest = history.evaluations[-1]
    if newest["step"] != history.step:
        return  # it is older than the newest step
    names = [name for name in newest if name.startswith("eval/") and name.endswith("pass@1")]
    falls = [seen for name in names if (seen := _fall(history, name)) is not None]
    yield from falls[:1]  # other metrics, such as the strict score, say the same


class _Accuracy(NamedTuple):
    value: float
    step: int
    problems: float

    @property
    def variance(self) -> float:
        """Variance of the share, with one more correct and one more wrong problem (Laplace)."""
        share = (self.value * self.problems + 1) / (self.problems + 2)
        return share * (1 - share) / (self.problems + 2)


def _fall(history: History, name: str) -> Seen | None:
    all_of_it = [
        _Accuracy(
            value, int(float(row["step"])),
            max(float(row.get("eval/num_problems", _FEW_PROBLEMS)), 1.0),
        )
        for row in history.evaluations
        if math.isfinite(value := float(row.get(name, math.nan)))
    ]  # fmt: skip
    if len(all_of_it) < 2:
        return None
    best, newest = max(all_of_it), all_of_it[-1]
    error = math.sqrt(best.variance + newest.variance)
    if newest.problems < _LEAST_PROBLEMS:
        return None
    if best.value - newest.value < max(_LEAST_FALL, _NOISE * error):
        return None
    early, late = _reward_until(history, best.step), history.last("reward", _WINDOW)
    reward, up = "", True
    if early is not None and late:
        up = fmean(late) > early
        reward = f", while the reward went from {early:.3g} to {fmean(late):.3g}"
    return Seen(
        f"Pass@1 ({name}) fell from {best.value:.3g} (after step {best.step}) to "
        f"{newest.value:.3g} (after step {newest.step}){reward}.",
        None if up else _OF_BOTH,
    )


def _reward_until(history: History, step: int) -> float | None:
    """Returns the mean reward of the last steps up to `step`, or else of the first steps."""
    before = [row for row in history.steps if float(row["step"]) <= step][-_WINDOW:]
    rewards = finite("reward", before or history.steps[:_WINDOW])
    return fmean(rewards) if rewards else None


EVALUATION_FALLS = Rule(
    name="evaluation_falls",
    metric="eval/{how}/pass@1",
    symptom="pass@1 of an evaluation is below its best by 0.05 and by three standard errors, on at "
    "least 8 problems.",
    cause="If the reward goes up meanwhile, the policy has found a way to earn it that is not "
    "what you want (reward hacking), or the training problems are learned by heart. If it falls "
    "as well, the policy is being destroyed.",
    advice="Read completions with a high reward in completions/, and repair the reward function; "
    "go back to the checkpoint of the best evaluation, with a smaller learning_rate or with beta.",
    look=falls,
)
