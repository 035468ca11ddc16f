"""Rules on the lengths of completions."""

from collections.abc import Iterator
from statistics import fmean

from grpo_eqx.tracking.diagnosis.history import EQUAL, History
from grpo_eqx.tracking.diagnosis.rule import Rule, Seen

_LENGTH, _CLIPPED = "completions/mean_length", "completions/clipped_ratio"
_WINDOW = 3
"""Steps that are averaged. A step has tens of completions, so its mean length varies little."""
_MANY = 0.5
"""Share of completions cut off. If most are cut off, the reward tells whether a completion was
short rather than right; DAPO (arXiv 2503.14476, section 3.4) calls this reward noise."""
_MANY_WITHOUT_REWARD = 0.25
"""Share that counts as many if no completion has a reward, because it explains that."""
_FEW = 0.1
"""Largest share cut off at a run's start with a limit that is long enough."""
_GROWTH = 2.0
"""Growth of the mean length. Healthy reasoning also grows (arXiv 2501.12948, figure 3), but over
hundreds of steps, and with the reward."""
_SOME = 0.25
"""Share of truncated completions above which lengths grow because completions do not end."""
_REWARD_WINDOW = 10
_SEE_ENDS = (
    "; as none ended by itself, see that the tokens at which completions end, in the run's first "
    "lines, are those of the model: eos_token_id in generation_config.json can be a list"
)


def truncated(history: History) -> Iterator[Seen]:
    if not history.newest(_CLIPPED) >= _MANY_WITHOUT_REWARD:
        return
    count, clipped = _recent_clipped(history)
    if clipped < _MANY_WITHOUT_REWARD or _was_long_enough(history):
        return
    rewards = history.last("reward", count) + history.last("reward_std", count)
    nothing = bool(rewards) and max(map(abs, rewards)) <= EQUAL
    if clipped > _MANY or nothing:
        limit = history.setting("max_completion_length", "the limit")
        ends = _SEE_ENDS if clipped == 1 else ""
        reward = ", and no completion had a reward" if nothing else ""
        yield Seen(
            f"{clipped:.0%} of the completions of {history.span(count)} were cut off at "
            f"max_completion_length ({limit}) before they ended{reward}.",
            f"{'; '.join(_ways_out(history))}{ends}.",
        )


def _ways_out(history: History) -> Iterator[str]:
    """Yields what helps where many completions are cut off, as parts of a sentence."""
    masks = history.setting("mask_truncated_completions", False)
    if history.has_tools:
        yield "Raise max_completion_length, in which answers of tools and environments count, too"
        yield f"{'or ' * masks}limit an answer with max_tool_response_length"
    else:
        yield "Raise max_completion_length"
        if not masks:
            yield "ask for shorter answers in the system_prompt"
    if not masks:
        yield "or leave what is cut off out of the loss (mask_truncated_completions)"


def exploded(history: History) -> Iterator[Seen]:
    before = min(history.first(_LENGTH, _WINDOW), default=0.0)
    if not (history.newest(_CLIPPED) >= _MANY or history.newest(_LENGTH) >= _GROWTH * before > 0):
        return
    count, clipped = _recent_clipped(history)
    lengths = history.last(_LENGTH, count)
    if len(lengths) < count:
        return
    length = fmean(lengths)
    unending = clipped >= _MANY and _was_long_enough(history)
    grown = length >= _GROWTH * before
    if not (unending or grown):
        return
    reward = _without_gain(history)
    if not unending and clipped < _SOME and reward is None:
        return
    yield Seen(
        f"Completions grew from {before:.3g} tokens at the start to {length:.3g} "
        f"({history.span(count)}); {clipped:.0%} of them are cut off at max_completion_length "
        f"({history.setting('max_completion_length', 'the limit')}){reward or ''}."
    )


def _recent_clipped(history: History) -> tuple[int, float]:
    """Returns the number of steps in the window, and the share cut off in them."""
    count = history.window(_WINDOW)
    clipped = history.last(_CLIPPED, count)
    return count, fmean(clipped) if len(clipped) == count else 0.0


def _was_long_enough(history: History) -> bool:
    return min(history.first(_CLIPPED, _WINDOW), default=1.0) <= _FEW


def _without_gain(history: History) -> str | None:
    """Returns words on the reward, unless it is higher than at the start."""
    early, late = (read("reward", _REWARD_WINDOW) for read in (history.first, history.last))
    if len(history.steps) < 2 * _REWARD_WINDOW or not early or not late:
        return None
    before, after = fmean(early), fmean(late)
    if after > before:
        return None
    return f", and the reward did not gain ({before:.3g}, now {after:.3g})"


TRUNCATED = Rule(
    name="truncated",
    metric="completions/clipped_ratio",
    symptom="More than half of the completions are cut off at `max_completion_length` "
    "(`completions/clipped_ratio`) over three steps; a quarter, where no completion has a reward. "
    "It was so from the start.",
    cause="The limit is shorter than the model's answers.",
    advice="Raise max_completion_length; ask for shorter answers in the system_prompt or, of tools "
    "and environments, limit them with max_tool_response_length; or leave what is cut off out of "
    "the loss (mask_truncated_completions).",
    look=truncated,
    steps=lambda history: history.window(_WINDOW),
)
EXPLODED = Rule(
    name="length_explosion",
    metric="completions/mean_length",
    symptom="Over three steps, half of the completions are cut off and at most a tenth was at "
    "the start; or completions are twice as long as at the start, and a quarter is cut off or the "
    "reward did not gain.",
    cause="The policy has forgotten how to end, after steps that were too large; or the reward "
    "pays for length.",
    advice="Look at the longest completions; lower learning_rate, or see that no reward function "
    "pays for length; overlong_buffer takes reward from what is too long, and loss_type dr_grpo "
    "does not favor long wrong answers.",
    look=exploded,
    steps=lambda history: history.window(_WINDOW),
)
