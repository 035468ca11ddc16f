"""GRPO's training steps in float64: plain torch, from the formulas, on a run's own completions.

Nothing of `grpo_eqx` is used. Hugging Face's Qwen2 reads every prompt with its completion as a
padded row of its own; rewards, advantages, losses, optimizers and schedules are written out from
TRL's documentation and the papers: GRPO (arXiv 2402.03300), DAPO (2503.14476), Dr. GRPO
(2503.20783), CISPO (2506.13585), SAPO (2511.20347), GSPO (2507.18071), INTELLECT-2's delta
(2505.07291), DeepSeek-V3.2's unbiased KL and off-policy mask (2512.02556), the mask of low-entropy
tokens (2506.01939), RLOO (2402.14740), REINFORCE++ (2501.03262), GDPO (2601.05242), TR-DPO's soft
update (2404.09656), AdamW (1711.05101) and Lion (2302.06675). Settings are a namespace with the
names and values of a resolved config, and with `reward_names`.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

Values = list[float]


class Row(NamedTuple):
    """A prompt and one completion of it."""

    prompt: list[int]
    completion: list[int]
    text: str
    gold: str


class Step(NamedTuple):
    """What a step comes to; what its updates come to, as their mean."""

    rewards: dict[str, Values]
    """Of each function, and `reward`, their weighted sum; NaN where there is none."""
    advantages: Values
    loss: float
    grad_norm: float
    """Before clipping."""
    clipped: float
    """Share of the counted tokens whose ratio was clipped."""


REWARDS: dict[str, Callable[[Row], float | None]] = {
    "distinct": lambda row: len(set(row.completion)) / len(row.completion),
    "odd": lambda row: sum(row.completion) % 2 if len(row.completion) % 3 else None,
    "share_of_gold": lambda row: (
        sum(c in row.gold for c in row.text) / len(row.text) if row.text else None
    ),
}


def rewards_of(s: Any, rows: list[Row]) -> dict[str, Values]:
    """Every function's rewards, DAPO's eq. 13 as one of them, and their weighted sum."""
    each = {}
    for name in s.reward_names:
        values = [REWARDS[name](row) for row in rows]
        each[name] = [math.nan if value is None else value for value in values]
    weights = list(s.reward_weights or [1.0] * len(each))
    if s.overlong_buffer:
        total = _weighted_sum(list(each.values()), weights)
        buffer = max(1, round(s.overlong_buffer * s.max_completion_length))
        free = [s.max_completion_length - buffer - len(row.completion) for row in rows]
        penalties = [max(-1.0, min(0.0, x / buffer)) for x in free]
        each["soft_overlong"] = [x + 0 * r for x, r in zip(penalties, total, strict=True)]
        weights.append(1.0)
    return {**each, "reward": _weighted_sum(list(each.values()), weights)}


def _weighted_sum(each: Sequence[Values], weights: Values) -> Values:
    """Over what is not missing; NaN where all is."""
    sums = []
    for row in zip(*each, strict=True):
        terms = [w * x for w, x in zip(weights, row, strict=True) if not math.isnan(x)]
        sums.append(sum(terms) if terms else math.nan)
    return sums


def advantages_of(s: Any, rewards: dict[str, Values]) -> Values:
    """Of rewards with prompts' groups one after the other; 0 where there is no reward."""

    def by_group(func: Callable[[Values], Values], values: Values) -> Values:
        starts = range(0, len(values), s.num_generations)
        return [x for i in starts for x in func(values[i : i + s.num_generations])]

    total = rewards["reward"]
    advantages = by_group(_centered, total)
    if s.multi_objective_aggregation == "normalize_then_sum":
        each = [by_group(_normalized, rewards[name]) for name in s.reward_names]
        advantages = _normalized(_weighted_sum(each, s.reward_weights or [1.0] * len(each)))
    elif s.advantage_estimator == "rloo":
        advantages = by_group(
            lambda x: [r - _mean(x[:i] + x[i + 1 :]) for i, r in enumerate(x)], total
        )
    elif s.advantage_estimator == "reinforce_plus_plus_baseline":
        advantages = _over_deviation(advantages, advantages)
    elif s.scale_rewards == "group":
        advantages = by_group(_normalized, total)
    elif s.scale_rewards == "batch":
        advantages = _over_deviation(advantages, total)
    return [0.0 if math.isnan(a) else a for a in advantages]


def _mean(values: Values) -> float:
    present = [value for value in values if not math.isnan(value)]
    return statistics.fmean(present) if present else math.nan


def _centered(values: Values) -> Values:
    return [value - _mean(values) for value in values]


def _over_deviation(values: Values, of: Values) -> Values:
    """Over the standard deviation of `of`, with TRL's 1e-4."""
    present = [value for value in of if not math.isnan(value)]
    deviation = statistics.stdev(present) if len(present) > 1 else math.nan
    return [value / (deviation + 1e-4) for value in values]


def _normalized(values: Values) -> Values:
    return _over_deviation(_centered(values), values)


def load_model(folder: Path) -> Any:
    """Hugging Face's model in float64; its own norms and rotations would stay in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    for module in model.modules():
        if isinstance(module, Qwen2RMSNorm):
            weight, eps = module.weight, module.variance_epsilon
            norm = torch.nn.functional.rms_norm
            module.forward = partial(norm, normalized_shape=weight.shape, weight=weight, eps=eps)
    base, head_dim = model.config.rope_parameters["rope_theta"], model.config.head_dim

    def rotations(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
        angles = (position_ids[..., None] / base**exponents).repeat(1, 1, 2)
        return angles.cos(), angles.sin()

    model.model.rotary_emb.forward = rotations
    return model


def token_stats(model: Any, rows: list[Row], temperature: float) -> list[tuple[Tensor, Tensor]]:
    """Log-probs and entropies of each completion's tokens."""
    width = max(len(row.prompt) + len(row.completion) for row in rows)
    ids, mask = torch.zeros(2, len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        both = torch.tensor(row.prompt + row.completion)
        ids[i, : len(both)], mask[i, : len(both)] = both, 1
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    logits = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    stats = []
    for row, of_row in zip(rows, logits, strict=True):
        first = len(row.prompt) - 1  # where the first token is predicted
        all_logps = of_row[first : first + len(row.completion)].div(temperature).log_softmax(-1)
        logps = all_logps.gather(1, torch.tensor(row.completion)[:, None])[:, 0]
        stats.append((logps, -(all_logps.exp() * all_logps).sum(-1)))
    return stats


class Scored(NamedTuple):
    """A row with what all updates on it need to know."""

    row: Row
    advantage: float
    old_logps: Tensor
    """Under the policy at the start of the step, which is also what sampled."""
    ref_logps: Tensor
    counts: bool


def policy_term(s: Any, r: Tensor, logps: Tensor, advantage: float) -> tuple[Tensor, Tensor]:
    """What is to grow, of each token, and where the ratio is clipped."""
    if s.loss_type == "cispo":
        return r.detach().clamp(max=s.epsilon_high) * advantage * logps, r > s.epsilon_high
    if s.loss_type == "sapo":
        tau = s.sapo_temperature_pos if advantage > 0 else s.sapo_temperature_neg
        return torch.sigmoid(tau * (r - 1)) * 4 / tau * advantage, torch.zeros_like(r)
    free = (r if s.delta is None else r.clamp(max=s.delta)) * advantage
    clipped = r.clamp(1 - s.epsilon, 1 + s.epsilon_high) * advantage
    return torch.minimum(free, clipped), clipped < free


def update_loss(s: Any, model: Any, share: list[Scored], tokens: float) -> tuple[Tensor, Tensor]:
    """The loss of one update, and where its tokens are clipped.

    `tokens` are the counted ones of the whole step, over the updates of one pass.
    """
    stats = token_stats(model, [x.row for x in share], s.temperature)
    counted = [(x, *of_row) for x, of_row in zip(share, stats, strict=True) if x.counts]
    all_entropies = torch.cat([entropies for _, _, entropies in counted])
    floor = all_entropies.detach().quantile(1 - s.top_entropy_quantile) - 1e-9  # with its ties
    sequences, stopped = [], []
    for x, logps, entropies in counted:
        log_ratio = logps - x.old_logps
        if s.importance_sampling_level == "sequence":
            log_ratio = log_ratio.mean().expand_as(logps)
        r = log_ratio.exp()
        gain, clipped = policy_term(s, r, logps, x.advantage)
        losses = -gain * (entropies >= floor)
        limit, drift = s.off_policy_mask_threshold, -log_ratio.mean()
        if limit is not None and x.advantage < 0 and drift > limit:
            losses = 0 * losses
        if s.beta:
            d = x.ref_logps - logps
            kl = {"k1": -d, "k2": d**2 / 2, "k3": d.exp() - d - 1}[s.kl_estimator]
            losses = losses + s.beta * (r * kl if s.use_bias_correction_kl else kl)
        sequences.append(losses)
        stopped.append(clipped)
    if s.loss_type in ("grpo", "sapo"):
        loss = torch.stack([losses.mean() for losses in sequences]).sum() / len(share)
    else:
        constant = len(share) * s.max_completion_length
        divisors = {"bnpo": len(all_entropies), "dr_grpo": constant, "dapo": tokens}
        loss = torch.cat(sequences).sum() / divisors.get(s.loss_type, tokens)
    bonus = s.entropy_coef * all_entropies[all_entropies >= floor].mean()
    return loss - bonus, torch.cat(stopped)


class Optimizer:
    """AdamW or Lion in optax's form, after clipping the gradient to a global norm."""

    def __init__(self, settings: Any, parameters: dict[str, Tensor]):
        self.settings, self.parameters, self.updates = settings, parameters, 0
        self.first = {name: torch.zeros_like(p) for name, p in parameters.items()}
        self.second = {name: torch.zeros_like(p) for name, p in parameters.items()}

    def learning_rate(self) -> float:
        """Linear from 0 during the warm-up, then the schedule over the updates that are left."""
        s = self.settings
        if self.updates < s.warmup_steps:
            return s.learning_rate * self.updates / s.warmup_steps
        num_updates = s.steps * s.num_iterations * s.steps_per_generation
        done = (self.updates - s.warmup_steps) / (num_updates - s.warmup_steps)
        shares = {"constant": 1, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
        return s.learning_rate * shares[s.lr_scheduler_type]

    @torch.no_grad()
    def update(self, gradients: Sequence[Tensor]) -> float:
        """Moves the parameters, and returns the norm of all gradients together."""
        s, rate = self.settings, self.learning_rate()
        self.updates += 1
        norm = math.sqrt(sum(g.square().sum().item() for g in gradients))
        scale = s.max_grad_norm / norm if norm > s.max_grad_norm else 1.0
        for (name, p), gradient in zip(self.parameters.items(), gradients, strict=True):
            g, m, v = scale * gradient, self.first[name], self.second[name]
            if s.optimizer == "lion":
                direction = (s.adam_beta1 * m + (1 - s.adam_beta1) * g).sign()
                m.lerp_(g, 1 - s.adam_beta2)
            else:
                m.lerp_(g, 1 - s.adam_beta1)
                v.lerp_(g**2, 1 - s.adam_beta2)
                unbiased = v / (1 - s.adam_beta2**self.updates)
                direction = m / (1 - s.adam_beta1**self.updates) / (unbiased.sqrt() + 1e-8)
            decay = s.weight_decay if p.ndim == 2 else 0.0  # not of norms and biases
            p.sub_(rate * (direction + decay * p))
        return norm


class Float64Run:
    """A run from a Hugging Face folder on, a step at a time."""

    def __init__(self, folder: Path, settings: Any, end_ids: Sequence[int]):
        self.settings, self.end_ids, self.steps_done = settings, end_ids, 0
        self.model, self.reference = load_model(folder), load_model(folder)
        self.parameters = dict(self.model.named_parameters())
        self.optimizer = Optimizer(settings, self.parameters)

    def step(self, rows: list[Row]) -> Step:
        """All updates on the completions of a step."""
        s, shares = self.settings, self.settings.steps_per_generation
        rewards = rewards_of(s, rows)
        advantages = advantages_of(s, rewards)
        with torch.no_grad():
            models = self.model, self.reference
            old, ref = ([logps for logps, _ in token_stats(m, rows, s.temperature)] for m in models)
        ended = [row.completion[-1] in self.end_ids for row in rows]
        counts = [end or not s.mask_truncated_completions for end in ended]
        scored = [Scored(*x) for x in zip(rows, advantages, old, ref, counts, strict=True)]
        tokens = sum(len(x.row.completion) for x in scored if x.counts) / shares
        losses, norms, clipped = [], [], []
        for number in list(range(shares)) * s.num_iterations:
            share = [x for i, x in enumerate(scored) if i // s.num_generations % shares == number]
            loss, stopped = update_loss(s, self.model, share, tokens)
            gradients = torch.autograd.grad(loss, list(self.parameters.values()))
            norms.append(self.optimizer.update(gradients))
            losses.append(loss.item())
            clipped.append(stopped.double().mean().item())
        self.steps_done += 1
        if s.sync_ref_model and self.steps_done % s.ref_model_sync_steps == 0:
            with torch.no_grad():
                for name, old_p in self.reference.named_parameters():
                    old_p.lerp_(self.parameters[name], s.ref_model_mixup_alpha)
        return Step(rewards, advantages, *map(statistics.fmean, (losses, norms, clipped)))
