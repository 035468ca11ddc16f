"""Rules on losses and gradients."""

import math
from collections.abc import Iterator
from statistics import median

from grpo_eqx.tracking.diagnosis.history import History
from grpo_eqx.tracking.diagnosis.rule import Rule, Seen

_SPIKE = 10.0
"""Norm over the median of the window. Healthy norms vary by a factor of 3. A norm of ten times the
median, even after clipping, changes Adam's second moment for a hundred updates."""
_SPIKES = 3
"""Spikes in a window. A single spike is clipped, and does no harm."""
_WINDOW = 20
_LEAST_STEPS = 8
"""Fewest steps for a meaningful median."""
_NEAR_0 = 0.2
"""Largest loss that counts as near 0, as advantages are about 1."""
_AFTER = 3
"""Steps after which a loss near 0, or a gradient of exactly 0, is not due to chance."""
_WITH_ZERO_MEAN = "grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"
"""Estimators whose advantages have mean 0, in each group or, without a baseline, in the batch."""
_OF_GROUPS = "grpo", "rloo", "reinforce_plus_plus_baseline"
_MEANS_OF_TOKENS = "dapo", "bnpo"
"""Losses that are a mean over all tokens; their gradient is A grad log p if ratios are 1."""


def spikes(history: History) -> Iterator[Seen]:
    limit = float(history.setting("max_grad_norm", 1.0))
    if not history.newest("grad_norm") > limit or len(history.steps) < _LEAST_STEPS:
        return
    norms = history.last("grad_norm", _WINDOW)
    usual = median(norms)
    limit = max(_SPIKE * usual, limit)
    high = [norm for norm in norms if norm > limit]
    if usual > 0 and norms[-1] > limit and len(high) >= _SPIKES:
        yield Seen(
            f"{len(high)} of the gradient norms of {history.span(_WINDOW)} are over {_SPIKE:.0f} "
            f"times the usual one ({usual:.3g}), up to {max(high):.3g}."
        )


def is_zero(history: History) -> Iterator[Seen]:
    if history.newest("grad_norm") != 0:
        return
    norms = history.last("grad_norm", _AFTER)
    uniform = history.last("frac_reward_zero_std", _AFTER)
    if len(norms) == len(uniform) == _AFTER and not any(norms) and max(uniform) < 1:
        yield Seen(
            f"The gradient's norm is exactly 0 in {history.span(_AFTER)}, although rewards differ "
            f"within groups: nothing is learned."
        )


def skipped(history: History) -> Iterator[Seen]:
    if not 0 < history.newest("skipped_updates") < math.inf:
        return
    count = sum(history.last("skipped_updates", _WINDOW))
    yield Seen(
        f"{count:.0f} update{'s were' if count > 1 else ' was'} skipped in "
        f"{history.span(_WINDOW)}, because loss or gradient was not finite; more than "
        f"{history.setting('max_skipped_updates', 3)} in a row end the run."
    )


def loss_near_0(history: History) -> Iterator[Seen]:
    if len(history.steps) != history.window(_AFTER) or history.updates_per_step != 1:
        return
    estimator = history.setting("advantage_estimator", "grpo")
    if estimator not in _WITH_ZERO_MEAN or any(
        history.setting(name, 0.0) != 0 for name in ("beta", "entropy_coef")
    ):
        return
    losses, norms = history.last("loss", _AFTER), history.last("grad_norm", _AFTER)
    if losses and norms and max(map(abs, losses)) < _NEAR_0 and norms[-1] > 0:
        of_tokens = history.setting("loss_type", None) in _MEANS_OF_TOKENS
        why = (
            "so that it is -sum(A L) / sum(L), for the advantages A, which add up to 0 in each "
            "group, and lengths L. The gradient, -sum(A grad log p) / sum(L),"
            if of_tokens and estimator in _OF_GROUPS
            else "and advantages average about 0, so that the loss does. Its gradient"
        )
        yield Seen(
            f"The loss is near 0 ({losses[-1]:.2g} in step {history.step}), and that is right: "
            f"with one update per rollout each ratio is 1, {why} does not vanish with it: its norm "
            f"is {norms[-1]:.2g}."
        )


SPIKES = Rule(
    name="gradient_spikes",
    metric="grad_norm",
    symptom="Three of twenty gradient norms are over ten times their median, and over "
    "`max_grad_norm`, before clipping.",
    cause="The learning rate is too large, rewards have outliers, or tokens of very low "
    "probability have large ratios.",
    advice="Lower learning_rate or max_grad_norm, and look for rewards of another size than the "
    "others.",
    look=spikes,
    steps=lambda history: _LEAST_STEPS,
)
IS_ZERO = Rule(
    name="gradient_is_zero",
    metric="grad_norm",
    symptom="The gradient's norm is exactly 0 in three steps in a row, although rewards differ "
    "within groups; rounding alone leaves none at 0.",
    cause="No gradient reaches the parameters: a loss backend or a model of your own stops it, or "
    "`mask_truncated_completions`, `off_policy_mask_threshold` or a masking "
    "`importance_sampling_mode` leaves no token to learn from.",
    advice="Compare the gradients of your loss backend with those of ChunkedLoss; or loosen what "
    "masks tokens.",
    look=is_zero,
    steps=lambda history: _AFTER,
)
SKIPPED = Rule(
    name="skipped_updates",
    metric="skipped_updates",
    symptom="An update was skipped, because its loss or gradient was not finite.",
    cause="Numbers overflow: extreme rewards or ratios, or a policy that has diverged.",
    advice="Look for extreme rewards; lower learning_rate, or compute in float32 (dtype).",
    look=skipped,
)
LOSS_NEAR_0 = Rule(
    name="loss_near_0",
    metric="loss",
    symptom="The loss is near 0 in the first steps, with one update per rollout and without a KL "
    "term.",
    cause="It is right so. With one update per rollout each ratio `p / p_old` is 1, and advantages "
    "average about 0, so that the loss does. Its gradient does not vanish with it. With "
    "`loss_type` dapo or bnpo and advantages `A` that add up to 0 in each group, for example, the "
    "loss is `-sum(A L) / sum(L)`, where lengths `L` differ little, and the gradient "
    "`-sum(A grad log p) / sum(L)`.",
    advice="Watch the reward, evaluations and the entropy; the loss says nothing here.",
    look=loss_near_0,
    kind="note",
)
