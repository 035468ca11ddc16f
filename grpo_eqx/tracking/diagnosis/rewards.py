"""Rules on rewards: functions that say nothing, and rewards that fall."""

import math
from collections.abc import Iterator
from statistics import median

from grpo_eqx.tracking.diagnosis.history import EQUAL, History
from grpo_eqx.tracking.diagnosis.rule import Rule, Seen

_EVIDENCE = 256
"""Equally scored completions that count as evidence. If one completion in fifty were right, this
many would all be wrong in 1 of 200 cases."""
_EVIDENCE_OF_SHORT_RUNS = 32
"""Completions that are enough in runs with fewer completions."""
_PROBLEMS = 80
"""Problems of which none was scored that count as evidence. Of several tasks or environments, each
is scored by its own functions; if one problem in twenty were a function's, this many would all be
others in 1 of 60 cases."""
_PROBLEMS_OF_SHORT_RUNS = 8
"""Problems that are enough in runs with fewer problems."""
_UNSCORED = 3
"""Fewest steps of these problems."""
_IN_A_ROW = 2
"""Steps after which a state of all completions is not due to a single batch."""
_FALL = 0.5
"""Fall of the mean reward, in standard deviations of single rewards, such as from 70 % to 47 % of
right answers."""
_NOISE = 7.0
"""Fall in standard errors of a window's mean, where each group counts as one reward. Large enough
for medians, and for the best of many windows, which exceeds the mean by chance."""
_WINDOW = 10
_OF_ENVIRONMENT_ZERO = (
    "Read a few completions with grpo-eqx inspect, and see what get_reward, or step, would have to "
    "reward in them; where it is right, begin with easier problems, more num_generations, or a "
    "reward for parts of the way."
)
_OF_ENVIRONMENT = (
    "Read a few completions with grpo-eqx inspect, and see what get_reward, or step, should not "
    "have rewarded in them; where it is right, choose harder problems."
)


def none(history: History) -> Iterator[Seen]:
    count = _steps_of_problems(history)
    if count * history.prompts < _PROBLEMS_OF_SHORT_RUNS or _is_nan(history, "reward"):
        return  # of no reward at all, another rule says more
    for func in history.reward_funcs:
        name = f"rewards/{func}/mean"
        if not _missing(history, name, count):
            continue
        if 0 < len(history.first(name, count)) < count:
            continue  # its problems are rare
        if func in history.environments:
            yield Seen(
                f"Environment {func} rewarded no completion of {history.span(count)}.",
                "See that its get_reward returns numbers, and that the data have problems of it.",
                subject=func,
            )
        else:
            yield Seen(
                f"Reward function {func} returned None for all completions of "
                f"{history.span(count)}.",
                subject=func,
            )


def all_missing(history: History) -> Iterator[Seen]:
    count = history.window(_IN_A_ROW)
    if _missing(history, "reward", count):
        yield Seen(f"No completion had a reward, so {history.span(count)} trained nothing.")


def never_fires(history: History) -> Iterator[Seen]:
    return _constant(history, zero=True)


def always_fires(history: History) -> Iterator[Seen]:
    return _constant(history, zero=False)


def _constant(history: History, *, zero: bool) -> Iterator[Seen]:
    count = _steps_of_evidence(history)
    if count * history.completions < _EVIDENCE_OF_SHORT_RUNS:
        return
    for func in history.reward_funcs:
        value = constant(history, f"rewards/{func}", count)
        if value is not None and (value == 0) == zero:
            is_own = func in history.environments
            who = f"Environment {func} gave" if is_own else f"Reward function {func} returned"
            yield Seen(
                f"{who} {'the reward ' * is_own}{value:g} for all completions of "
                f"{history.span(count)} that it scored: from equal rewards nothing is learned.",
                (_OF_ENVIRONMENT_ZERO if zero else _OF_ENVIRONMENT) if is_own else None,
                subject=func,
            )


def _steps_of_evidence(history: History) -> int:
    return history.window_of(_EVIDENCE, history.completions, _IN_A_ROW)


def constant(history: History, name: str, count: int) -> float | None:
    """Returns the common value of all rewards in the first and last `count` steps, if any."""
    mean, std = (name, f"{name}_std") if name == "reward" else (f"{name}/mean", f"{name}/std")
    if not history.newest(std) <= EQUAL * max(1.0, abs(history.newest(mean))):
        return None
    values = []
    for read in (history.first, history.last):
        means, deviations = read(mean, count), read(std, count)
        if len(means) < count or len(deviations) < count:
            return None
        values += [*means, *(x + means[0] for x in deviations)]
    equal = max(values) - min(values) <= EQUAL * max(1.0, abs(values[0]))
    return values[0] if equal else None


def sum_is_constant(history: History) -> Iterator[Seen]:
    settings = history.settings
    if settings.get("multi_objective_aggregation") == "normalize_then_sum":
        return
    deviations = [history.newest(f"rewards/{func}/std") for func in history.reward_funcs]
    largest = max((x for x in deviations if math.isfinite(x)), default=0.0)
    if largest == 0 or not history.newest("reward_std") <= EQUAL * largest:
        return
    count = history.window(_IN_A_ROW)
    sums = history.last("reward_std", count)
    if len(sums) == count and max(sums) <= EQUAL * largest:
        yield Seen(
            f"The weighted rewards of {history.span(count)} add up to "
            f"{history.newest('reward'):g} for all completions, although those of single "
            f"functions differ: from equal rewards nothing is learned."
        )


def too_large(history: History) -> Iterator[Seen]:
    if math.isfinite(history.newest("reward_std")):
        return
    count = history.window(_IN_A_ROW)
    means, deviations = history.last("reward", count), history.recorded("reward_std", count)
    if len(means) == len(deviations) == count and not any(map(math.isfinite, deviations)):
        yield Seen(
            f"The rewards of {history.span(count)} are too large for float32: their mean is "
            f"{means[-1]:g}, and their deviation is not finite."
        )


def fell(history: History) -> Iterator[Seen]:
    best, deviation = history.best_reward, history.best_reward_std
    least = deviation * max(_FALL, _NOISE / math.sqrt(history.prompts * _WINDOW))
    if not history.newest("reward") < best - least:
        return
    rewards = history.last("reward", _WINDOW)
    now = median(rewards)
    apart = history.step >= history.best_reward_step + _WINDOW
    if apart and len(rewards) == _WINDOW and now < best - least:
        first = history.best_reward_step - _WINDOW + 1
        yield Seen(
            f"The reward fell from {best:.3g} (steps {first} to {history.best_reward_step}) to "
            f"{now:.3g} ({history.span(_WINDOW)}), the medians of ten steps."
        )


def _steps_of_problems(history: History) -> int:
    return history.window_of(_PROBLEMS, history.prompts, _UNSCORED)


def _is_nan(history: History, name: str) -> bool:
    return name in history.steps[-1] and math.isnan(history.newest(name))


def _missing(history: History, name: str, count: int) -> bool:
    if math.isfinite(history.newest(name)):
        return False
    values = history.recorded(name, count)
    return len(values) == count and all(map(math.isnan, values))


NONE = Rule(
    name="reward_none",
    metric="rewards/{func}/mean",
    symptom="A function's reward is `None` for all completions over three steps and 80 problems, "
    "or all that a shorter run has (8 problems at least). Nothing is said where it scored some of "
    "the first steps and not others, because its problems are rare.",
    cause="The function reads a column or a format that the data does not have, and takes each "
    "completion for one that it does not apply to.",
    advice="Look at what the function returns for a completion of the table in completions/, and "
    "at the columns that it reads.",
    look=none,
    steps=_steps_of_problems,
)
ALL_MISSING = Rule(
    name="no_reward",
    metric="reward",
    symptom="No completion of two steps in a row has any reward.",
    cause="All functions return `None`, or fail.",
    advice="Let at least one reward function, or get_reward of the environment, return a number "
    "for each completion, or see why it failed (rewards/*/num_failed).",
    look=all_missing,
    steps=lambda history: history.window(_IN_A_ROW),
)
NEVER_FIRES = Rule(
    name="reward_never_fires",
    metric="rewards/{func}/mean",
    symptom="A function's reward is 0 for all completions, from the first step on, for at least "
    "256 of them, or all that a shorter run has (32 at least).",
    cause="The function does not find the answer where the model writes it, or the problems are "
    "too hard for the model.",
    advice="Call the function on a few completions of the table in completions/; where it is "
    "right, begin with easier problems, more num_generations, or a reward for parts of the way.",
    look=never_fires,
    steps=_steps_of_evidence,
)
ALWAYS_FIRES = Rule(
    name="reward_always_fires",
    metric="rewards/{func}/mean",
    symptom="A function's reward is the same number, other than 0, for all completions, from the "
    "first step on, for at least 256 of them, or all that a shorter run has (32 at least).",
    cause="The function tests something that the model always does, or returns a default.",
    advice="Call the function on a completion that it should not reward; where it is right, "
    "leave it out, or choose harder problems.",
    look=always_fires,
    steps=_steps_of_evidence,
)
SUM_IS_CONSTANT = Rule(
    name="rewards_cancel",
    metric="reward_std",
    symptom="The weighted sum of the rewards is the same for all completions of two steps in a "
    "row, although the functions' own rewards differ.",
    cause="`reward_weights` are 0 for the functions that differ, or make them cancel.",
    advice="Change reward_weights.",
    look=sum_is_constant,
    steps=lambda history: history.window(_IN_A_ROW),
)
TOO_LARGE = Rule(
    name="rewards_too_large",
    metric="reward_std",
    symptom="The rewards' standard deviation is not finite in two steps in a row.",
    cause="A reward function returns numbers such as 1e30.",
    advice="Scale the rewards to about -1 to 1.",
    look=too_large,
    steps=lambda history: history.window(_IN_A_ROW),
)
FELL = Rule(
    name="reward_fell",
    metric="reward",
    symptom="The reward (the median of ten steps) is below that of the best ten by half a "
    "standard deviation of single rewards, and by more than chance explains.",
    cause="The steps are too large: the policy has left what it could do.",
    advice="Go back to a checkpoint from before, with a third of the learning_rate; a KL term "
    "(beta) or fewer updates per rollout hold the policy as well.",
    look=fell,
    steps=lambda history: 2 * _WINDOW,
)
