"""Reference values of the objective, in torch and in float64: TRL's own, and the papers'.

Inputs are arrays by the names of `TokenBatch`'s fields, `[P, G, Tc]` or `[P, G]`. TRL has prompts
and the completions of their groups on one axis.
"""

import functools
import math
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import MethodType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from grpo_eqx.objective import Objective

Inputs = Mapping[str, np.ndarray]


class Reference(NamedTuple):
    loss: float
    logps_gradient: np.ndarray
    entropies_gradient: np.ndarray
    metrics: dict[str, float]
    """Under TRL's names; only from TRL."""


def trl_has(objective: Objective) -> bool:
    """Whether TRL has all that the objective asks for."""
    k3 = objective.kl_estimator == "k3" and objective.kl_clamp is None
    return (
        objective.importance_sampling_level != "sequence_token"
        and objective.dual_clip is None
        and (not objective.beta or k3)
    )


# TRL.


def trl_loss(
    objective: Objective,
    inputs: Inputs,
    *,
    top_entropy_quantile: float = 1.0,
    num_shares: int = 1,
    rollout_tokens: int | None = None,
) -> Reference:
    """TRL's own `_compute_loss`, on a trainer with no more than what it reads.

    `inputs` have no `policy_mask`: TRL finds that mask itself, from `top_entropy_quantile`. They
    are one of `num_shares` updates on a rollout of `rollout_tokens`, or the whole rollout.
    """
    assert trl_has(objective)
    assert "policy_mask" not in inputs
    arrays = _flattened(inputs)
    logps, entropies, mask = arrays["logps"], arrays["entropies"], arrays["mask"].long()
    batch = {
        "prompt_ids": torch.zeros(len(mask), 1, dtype=torch.long),
        "prompt_mask": torch.ones(len(mask), 1, dtype=torch.long),
        "completion_ids": torch.zeros_like(mask),
        "completion_mask": mask,
        "advantages": arrays["advantages"],
        "num_items_in_batch": mask.sum()
        if rollout_tokens is None
        else torch.tensor(rollout_tokens),
        "sampling_per_token_logps": arrays["sampler_logps"],
    }
    for ours, theirs in (
        ("old_logps", "old_per_token_logps"),
        ("ref_logps", "ref_per_token_logps"),
    ):
        if ours in arrays:
            batch[theirs] = arrays[ours]
    trainer = _trainer(objective, logps, entropies, top_entropy_quantile)
    trainer.args.steps_per_generation = num_shares
    recorded = trainer._metrics["train"]
    if objective.importance_sampling_mode is not None:
        old_logps = arrays.get("old_logps", logps.detach())
        batch["importance_sampling_ratio"], sampling = _importance_sampling_ratio(
            objective, old_logps, arrays["sampler_logps"], mask
        )
        recorded.update(sampling)
    loss = _grpo_trainer()._compute_loss(trainer, trainer.model, batch)
    metrics = {name: values[0] for name, values in recorded.items() if name != "entropy_coef"}
    return _reference(loss, logps, entropies, inputs, metrics)


def trl_policy_mask(inputs: Inputs, top_entropy_quantile: float) -> np.ndarray:
    """TRL's own mask of the tokens with the highest entropies."""
    arrays = _flattened(inputs)
    trainer = SimpleNamespace(accelerator=_one_process())
    mask = _grpo_trainer().get_high_entropy_mask(
        trainer, arrays["entropies"].detach(), arrays["mask"].long(), 1 - top_entropy_quantile
    )
    return mask.numpy().reshape(inputs["mask"].shape)


@functools.cache
def _grpo_trainer() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl.trainer.grpo_trainer import GRPOTrainer  # late, for it takes seconds
    return GRPOTrainer


def _one_process() -> SimpleNamespace:
    """What TRL uses of an `Accelerator`, where there is one process."""
    return SimpleNamespace(
        num_processes=1,
        sync_gradients=True,
        gather=lambda x: x,
        reduce=lambda x, reduction: x,
        pad_across_processes=lambda x, dim, pad_index: x,
    )


def _trainer(
    objective: Objective, logps: Tensor, entropies: Tensor, top_entropy_quantile: float
) -> SimpleNamespace:
    """What `_compute_loss` reads of a `GRPOTrainer`, whose model gives these log-probs."""
    with_correction = objective.importance_sampling_mode is not None
    trainer = SimpleNamespace(
        accelerator=_one_process(),
        args=SimpleNamespace(
            delta=objective.delta,
            sapo_temperature_neg=objective.sapo_temperature_neg,
            sapo_temperature_pos=objective.sapo_temperature_pos,
            steps_per_generation=1,
            use_bias_correction_kl=objective.use_bias_correction_kl,
        ),
        aux_loss_enabled=False,
        beta=objective.beta or 0.0,
        current_gradient_accumulation_steps=1,
        entropy_coef=objective.entropy_coef or 0.0,
        epsilon_high=objective.epsilon_high,
        epsilon_low=objective.epsilon,
        importance_sampling_level=objective.importance_sampling_level,
        loss_type=objective.loss_type,
        max_completion_length=objective.max_completion_length,
        model=SimpleNamespace(training=True),
        off_policy_mask_threshold=objective.off_policy_mask_threshold,
        top_entropy_quantile=top_entropy_quantile,
        use_adaptive_entropy=False,
        use_vllm=with_correction,
        vllm_importance_sampling_correction=with_correction,
        _entropy_bonus_enabled=objective.entropy_coef is not None,
        _get_per_token_logps_and_entropies=lambda *_, **__: (logps, entropies, None),
        _metrics={"train": defaultdict(list)},
    )
    theirs = _grpo_trainer()
    trainer.get_off_policy_mask = theirs.get_off_policy_mask
    trainer.get_high_entropy_mask = MethodType(theirs.get_high_entropy_mask, trainer)
    return trainer


def _importance_sampling_ratio(
    objective: Objective, old_logps: Tensor, sampler_logps: Tensor, mask: Tensor
) -> tuple[Tensor, dict[str, list[float]]]:
    """TRL's importance weights and their metrics.

    Formulas of its `_generate_and_score_completions`, which computes them inline.
    """
    level, how = str(objective.importance_sampling_mode).split("_")
    low, high = objective.importance_sampling_clip_min, objective.importance_sampling_clip_max
    log_ratio = (old_logps - sampler_logps) * mask
    if level == "sequence":
        log_ratio = log_ratio.sum(dim=-1, keepdim=True)
    ratio = torch.exp(log_ratio)
    if how == "truncate":
        ratio = torch.clamp(ratio, min=low, max=high)
    else:
        low, high = -math.inf if low is None else low, math.inf if high is None else high
        ratio = ratio.masked_fill((ratio < low) | (ratio > high), 0.0)
    difference = (old_logps - sampler_logps).abs()[mask.bool()]
    flat = ratio.flatten() if level == "sequence" else ratio[mask.bool()]
    return ratio, {
        "sampling/sampling_logp_difference/mean": [difference.mean().item()],
        "sampling/sampling_logp_difference/max": [difference.max().item()],
        "sampling/importance_sampling_ratio/min": [flat.min().item()],
        "sampling/importance_sampling_ratio/mean": [flat.mean().item()],
        "sampling/importance_sampling_ratio/max": [flat.max().item()],
    }


# The papers.


def paper_loss(objective: Objective, inputs: Inputs) -> Reference:
    """The objective from the papers' formulas, one token after the other."""
    arrays = _flattened(inputs)
    logps, entropies, mask = arrays["logps"], arrays["entropies"], arrays["mask"].bool()
    old_logps = arrays.get("old_logps", logps.detach())
    policy_mask = arrays.get("policy_mask", mask).bool()
    sequences, acted_on = [], []
    for i, advantage in enumerate(arrays["advantages"].tolist()):
        tokens = [t for t in range(mask.shape[1]) if mask[i, t]]
        new, old, sampler = (
            [x[i, t] for t in tokens] for x in (logps, old_logps, arrays["sampler_logps"])
        )
        ratios = _ratios(objective, new, old)
        weights = _sampler_weights(objective, old, sampler)
        keep = _keeps(objective, advantage, new, sampler)
        losses = []
        for n, t in enumerate(tokens):
            loss = torch.zeros((), dtype=torch.float64)
            if keep and policy_mask[i, t]:
                loss = -weights[n] * _policy_term(objective, ratios[n], new[n], advantage)
            if objective.beta:
                unbiased = ratios[n] if objective.use_bias_correction_kl else 1
                kl = _kl_term(objective, new[n], arrays["ref_logps"][i, t])
                loss = loss + objective.beta * unbiased * kl
            if policy_mask[i, t]:
                acted_on.append(entropies[i, t])
            losses.append(loss)
        sequences.append(losses)
    loss = _aggregate(objective, sequences) + 0 * logps.sum()
    if acted_on:
        loss = loss - (objective.entropy_coef or 0.0) * sum(acted_on) / len(acted_on)
    return _reference(loss, logps, entropies, inputs, {})


def _ratios(objective: Objective, new: Sequence[Tensor], old: Sequence[Tensor]) -> list[Tensor]:
    """pi / pi_old of every token: its own, or of the sequence (GSPO, eq. 7 and 14)."""
    if not new:
        return []
    of_tokens = [torch.exp(n) / torch.exp(o) for n, o in zip(new, old, strict=True)]
    if objective.importance_sampling_level == "token":
        return of_tokens
    # (pi(y | x) / pi_old(y | x)) ^ (1 / |y|)
    of_sequence = math.prod(of_tokens) ** (1 / len(of_tokens))
    if objective.importance_sampling_level == "sequence":
        return [of_sequence] * len(new)
    return [of_sequence.detach() * torch.exp(n) / torch.exp(n).detach() for n in new]


def _policy_term(objective: Objective, ratio: Tensor, logp: Tensor, advantage: float) -> Tensor:
    """What is maximized for one token."""
    if objective.loss_type == "cispo":
        # CISPO (arXiv 2506.13585), eq. 4 and 5, where epsilon_high is the bound itself.
        return min(ratio.item(), objective.epsilon_high) * advantage * logp
    if objective.loss_type == "sapo":
        # SAPO (arXiv 2511.20347), eq. 6
        positive, other = objective.sapo_temperature_pos, objective.sapo_temperature_neg
        tau = positive if advantage > 0 else other
        return 4 / tau / (1 + torch.exp(-tau * (ratio - 1))) * advantage
    # PPO, DAPO's upper bound and INTELLECT-2's, by the sign of the advantage.
    high = 1 + objective.epsilon_high
    if advantage >= 0:
        return _bounded(ratio, -math.inf, high) * advantage
    cap = math.inf if objective.delta is None else objective.delta
    assert cap > high
    term = _bounded(ratio, 1 - objective.epsilon, cap) * advantage
    if objective.dual_clip is None:
        return term
    # Dual-clip PPO (arXiv 1912.09729), eq. 5
    return _bounded(term, objective.dual_clip * advantage, math.inf)


def _sampler_weights(
    objective: Objective, old: Sequence[Tensor], sampler: Sequence[Tensor]
) -> list[float]:
    """Truncated or masked importance weights between sampler and trainer."""
    rhos = [math.exp(o.item() - s.item()) for o, s in zip(old, sampler, strict=True)]
    if objective.importance_sampling_mode is None:
        return [1.0] * len(rhos)
    if objective.importance_sampling_mode.startswith("sequence"):
        rhos = [math.prod(rhos)] * len(rhos)
    low, high = objective.importance_sampling_clip_min, objective.importance_sampling_clip_max
    low, high = 0.0 if low is None else low, math.inf if high is None else high
    if objective.importance_sampling_mode.endswith("truncate"):
        return [max(low, min(rho, high)) for rho in rhos]
    return [rho if low <= rho <= high else 0.0 for rho in rhos]


def _keeps(
    objective: Objective, advantage: float, new: Sequence[Tensor], sampler: Sequence[Tensor]
) -> bool:
    """M of DeepSeek-V3.2's off-policy sequence mask (arXiv 2512.02556, eq. 9)."""
    if objective.off_policy_mask_threshold is None or advantage >= 0 or not new:
        return True
    drifts = [s.item() - n.item() for n, s in zip(new, sampler, strict=True)]
    return sum(drifts) / len(drifts) <= objective.off_policy_mask_threshold


def _kl_term(objective: Objective, logp: Tensor, ref_logp: Tensor) -> Tensor:
    """Schulman's k1, k2 and k3, with verl's clamps for k3."""
    log_inverse = ref_logp - logp
    if objective.kl_estimator == "k1":
        return -log_inverse
    if objective.kl_estimator == "k2":
        return 0.5 * log_inverse**2
    if objective.kl_clamp is None:
        return torch.exp(log_inverse) - 1 - log_inverse
    log_inverse = _bounded(log_inverse, -20.0, 20.0)
    k3 = torch.exp(log_inverse) - 1 - log_inverse
    return _bounded(k3, -objective.kl_clamp, objective.kl_clamp)


def _aggregate(objective: Objective, sequences: Sequence[Sequence[Tensor]]) -> Tensor | float:
    """From losses of tokens to that of the batch."""
    if objective.loss_type in ("grpo", "sapo"):
        return sum(sum(losses) / len(losses) for losses in sequences if losses) / len(sequences)
    total = sum(sum(losses) for losses in sequences)
    if objective.loss_type == "dr_grpo":
        return total / (len(sequences) * objective.max_completion_length)
    return total / max(1, sum(len(losses) for losses in sequences))


def _bounded(x: Tensor, low: float, high: float) -> Tensor:
    """`x` or, as a constant, the bound that it is beyond."""
    return x if low <= x.item() <= high else torch.tensor(low if x < low else high, dtype=x.dtype)


# Both.


def _flattened(inputs: Inputs) -> dict[str, Tensor]:
    """`[B, T]` or `[B]` tensors in float64; gradients flow to log-probs and entropies."""
    tensors = {
        name: torch.from_numpy(np.array(x)).flatten(0, 1).double() for name, x in inputs.items()
    }
    for name in ("logps", "entropies"):
        tensors[name].requires_grad_()
    return tensors


def _reference(
    loss: Tensor, logps: Tensor, entropies: Tensor, inputs: Inputs, metrics: dict[str, float]
) -> Reference:
    gradients = torch.autograd.grad(
        loss, (logps, entropies), allow_unused=True, materialize_grads=True
    )
    shape = inputs["mask"].shape
    return Reference(loss.item(), *(x.numpy().reshape(shape) for x in gradients), metrics)
