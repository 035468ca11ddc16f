"""Rules on the policy's distribution: its entropy, and how far it is from others."""

from collections.abc import Iterator
from statistics import fmean, median

from grpo_eqx.common.errors import listed
from grpo_eqx.tracking.diagnosis.history import History
from grpo_eqx.tracking.diagnosis.rule import Rule, Seen

_ENTROPY = "entropy"
_ENTROPY_LEFT = 0.1
"""Remaining share of the entropy at the start. Reward costs entropy (arXiv 2505.22617): healthy
runs keep a fifth. In a collapse, the completions of a group become nearly the same (DAPO, arXiv
2503.14476, section 3.1)."""
_ENTROPY_WINDOW = 10
_AT_START = 3
"""Steps that define the start of a run."""
_ENTROPY_GROWTH = 1.5
"""Growth of the entropy that, together with a lower reward, shows a policy becoming random.
Clip-higher and an entropy bonus let entropy and reward grow a little together."""
_FALL = 1 / 3
"""Fall of the reward, in standard deviations of single rewards at the start."""
_GAP = "sampling/sampling_logp_difference/mean"
_MOST_GAP = 0.03
"""Mean difference of log-probs. NeMo RL investigates 0.05 between two engines, and expects 0.01 to
0.04 (docs/adding-new-models.md). Here, both sides run the same model: the difference is 4e-7 with
float32, 1e-3 with int8 weights, and 0.04 with top_p 0.5."""
_MOST_GAP_CORRECTED = 0.1
"""Limit with importance_sampling_mode, which corrects for the difference. Above it, weights of
single tokens vary so much that they are capped, or noise."""
_GAP_WINDOW = 3
_MOST_KL = 0.5
"""KL divergence in nats per token, as if the reference gave each token 0.6 times the probability.
Healthy runs with beta 0.04 have at most 0.05."""
_KL_WINDOW = 5
_CLIPPED_RATIOS = "clip_ratio/region_mean"
_MOST_CLIPPED = 0.5
"""Share of tokens whose gradient is clipped. GSPO clips 0.15 of all tokens, and GRPO a hundredth of
this (arXiv 2507.18071, figure 2)."""

_WITHOUT_TOKEN = "completions/num_ids_without_token"
_ID_WINDOW = 2


def without_token(history: History) -> Iterator[Seen]:
    if not history.newest(_WITHOUT_TOKEN) > 0:
        return
    steps = history.window(_ID_WINDOW)
    counts = history.last(_WITHOUT_TOKEN, steps)
    if len(counts) == steps and min(counts) > 0:
        yield Seen(
            f"The completions of {history.span(steps)} have {sum(counts):,.0f} ids for which the "
            f"tokenizer has no token: their texts, which rewards see, leave these out."
        )


def entropy_collapsed(history: History) -> Iterator[Seen]:
    before = max(history.first(_ENTROPY, _AT_START), default=0.0)
    if not history.newest(_ENTROPY) < _ENTROPY_LEFT * before:
        return
    values = history.last(_ENTROPY, _ENTROPY_WINDOW)
    enough = len(values) == _ENTROPY_WINDOW <= len(history.steps) - _AT_START
    if enough and (now := median(values)) < _ENTROPY_LEFT * before:
        if history.is_solved(_ENTROPY_WINDOW):
            return  # the policy is certain, and right
        yield Seen(
            f"The entropy fell from {before:.3g} nats per token at the start to {now:.3g} "
            f"({history.span(_ENTROPY_WINDOW)}): the completions of a group are nearly the same, "
            f"and little is left to learn from."
        )


def entropy_exploded(history: History) -> Iterator[Seen]:
    before = min(history.first(_ENTROPY, _AT_START), default=0.0)
    if not history.newest(_ENTROPY) > _ENTROPY_GROWTH * before:
        return
    if len(history.steps) < _AT_START + _KL_WINDOW:
        return
    values = history.last(_ENTROPY, _KL_WINDOW)
    if len(values) < _KL_WINDOW or not 0 < _ENTROPY_GROWTH * before < (now := median(values)):
        return
    # Only the first step, because a step that is far too large destroys the policy at once.
    early, late = history.first("reward", 1), history.last("reward", _KL_WINDOW)
    deviation = max(history.first("reward_std", 1), default=0.0)
    if early and late and early[0] - fmean(late) > _FALL * deviation > 0:
        yield Seen(
            f"The entropy grew from {before:.3g} nats per token at the start to {now:.3g} "
            f"({history.span(_KL_WINDOW)}), and the reward fell from {early[0]:.3g} to "
            f"{fmean(late):.3g}: the policy becomes random."
        )


def sampler_gap(history: History) -> Iterator[Seen]:
    if not history.newest(_GAP) >= _MOST_GAP:
        return
    count = history.window(_GAP_WINDOW)
    gaps = history.last(_GAP, count)
    corrected = history.setting("importance_sampling_mode", "none") not in (None, "none")
    most = _MOST_GAP_CORRECTED if corrected else _MOST_GAP
    if len(gaps) < count or (gap := fmean(gaps)) < most:
        return
    cause, advice = _cause_of_gap(history)
    yield Seen(
        f"The log-probs of the sampler and of the trainer differ by {gap:.2g} per token in "
        f"{history.span(count)}, where {most} is much{cause}.",
        advice,
    )


def _cause_of_gap(history: History) -> tuple[str, str | None]:
    """Returns words on settings that explain a gap, and advice on them."""
    full = {"top_k": None, "top_p": 1.0, "min_p": 0.0}
    cut = [
        f"{name} {value}"
        for name, none in full.items()
        if (value := history.settings.get(name, none)) != none
    ]
    if cut:
        return (
            f": {listed(cut)} cut the sampler's distribution, and the trainer has all of it",
            f"Leave {listed([name.split()[0] for name in cut])} out, and lower temperature a "
            f"little instead; or correct with importance_sampling_mode.",
        )
    if staleness := int(history.setting("max_staleness", 0)):
        return (
            f": with max_staleness {staleness}, older policies drew some of the tokens",
            "Lower max_staleness or learning_rate, so that policies differ less.",
        )
    rounded = [
        f"{name} {history.settings[name]}"
        for name in ("rollout_dtype", "kv_cache_dtype")
        if history.settings.get(name) in ("int8", "bfloat16")
    ]
    return (f", with {listed(rounded)}" if rounded else ""), None


def kl_blew_up(history: History) -> Iterator[Seen]:
    if not history.newest("kl") >= _MOST_KL:
        return
    count = history.window(_KL_WINDOW)
    values = history.last("kl", count)
    if len(values) == count and (kl := median(values)) >= _MOST_KL:
        yield Seen(
            f"The KL divergence to the reference is {kl:.3g} nats per token "
            f"({history.span(count)}), with beta {history.setting('beta', 0):g}: the policy has "
            f"left the reference."
        )


def ratios_clipped(history: History) -> Iterator[Seen]:
    if not history.newest(_CLIPPED_RATIOS) >= _MOST_CLIPPED:
        return
    if history.setting("importance_sampling_level", "token") != "token":
        return  # GSPO's narrow range clips far more
    count = history.window(_KL_WINDOW)
    values = history.last(_CLIPPED_RATIOS, count)
    if len(values) == count and (share := fmean(values)) >= _MOST_CLIPPED:
        yield Seen(
            f"The gradients of {share:.0%} of the tokens were clipped, as the policy left the one "
            f"that sampled ({history.span(count)}; {history.updates_per_step} updates per rollout)."
        )


WITHOUT_TOKEN = Rule(
    name="ids_without_token",
    metric="completions/num_ids_without_token",
    symptom="In two steps, completions have ids for which the tokenizer has no token "
    "(`completions/num_ids_without_token`).",
    cause="The tokenizer is another model's or lacks tokens, or the rows that pad the model's head "
    "were not trained and have large logits.",
    advice="Use the model's own tokenizer, with all of its tokens; if it is, cut the padding off "
    "with resize_token_embeddings of transformers, or set min_p, which leaves unlikely tokens out.",
    look=without_token,
    steps=lambda history: history.window(_ID_WINDOW),
)
ENTROPY_COLLAPSED = Rule(
    name="entropy_collapse",
    metric="entropy",
    symptom="The entropy of ten steps (their median) is below a tenth of that at the start, and "
    "the problems are not solved: the reward is below its best, or its standard deviation above "
    "half of that at the start.",
    cause="The policy is pushed to a few answers faster than it finds better ones.",
    advice="Lower learning_rate, or raise epsilon_high (DAPO: 0.28) with several updates per "
    "rollout; entropy_coef or beta hold the entropy as well.",
    look=entropy_collapsed,
    steps=lambda history: _AT_START + _ENTROPY_WINDOW,
)
ENTROPY_EXPLODED = Rule(
    name="entropy_explosion",
    metric="entropy",
    symptom="The entropy of five steps (their median) is 1.5 times that at the start, and the "
    "reward has fallen by a third of its standard deviation.",
    cause="The steps are so large that they destroy the policy.",
    advice="Start again, or from a checkpoint before it, with a learning_rate ten times lower; "
    "warmup_steps and beta help as well.",
    look=entropy_exploded,
    steps=lambda history: _AT_START + _KL_WINDOW,
)
SAMPLER_GAP = Rule(
    name="sampler_gap",
    metric="sampling/sampling_logp_difference/mean",
    symptom="The log-probs of sampler and trainer differ by 0.03 per token on average "
    "(`sampling/sampling_logp_difference/mean`) over three steps; by 0.1 with "
    "`importance_sampling_mode`.",
    cause="The sampler draws from another distribution than the trained one: rounded "
    "weights or cache, `top_p`, `top_k` or `min_p`, older policies with `max_staleness`, or a bug, "
    "as in a loss backend of your own.",
    advice="Sample with the trained weights (rollout_dtype and kv_cache_dtype auto), or correct "
    "with importance_sampling_mode; compare a loss backend of your own with DenseLoss.",
    look=sampler_gap,
    steps=lambda history: history.window(_GAP_WINDOW),
)
KL_BLEW_UP = Rule(
    name="kl_blow_up",
    metric="kl",
    symptom="The KL divergence to the reference is above 0.5 nats per token over five steps.",
    cause="The steps are too large, or `beta` is too small for the reward.",
    advice="Lower learning_rate, or raise beta; kl_clamp bounds single tokens.",
    look=kl_blew_up,
    steps=lambda history: history.window(_KL_WINDOW),
)
RATIOS_CLIPPED = Rule(
    name="ratios_clipped",
    metric="clip_ratio/region_mean",
    symptom="The gradients of half of the tokens are clipped (`clip_ratio/region_mean`) over "
    "five steps, with ratios per token.",
    cause="The policy has moved far from the sampling policy: too many or too large updates on "
    "each rollout.",
    advice="Lower learning_rate, num_iterations or steps_per_generation.",
    look=ratios_clipped,
    steps=lambda history: history.window(_KL_WINDOW),
)
