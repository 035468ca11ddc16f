"""The full objective of an update: every term, in order, from per-token log-probs."""

import dataclasses
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from grpo_eqx.common.choices import (
    CLIPPED_LOSSES,
    SAMPLER_WEIGHTS,
    ImportanceSamplingLevel,
    KLEstimator,
    LossType,
    SamplerCorrection,
)
from grpo_eqx.common.shapes import Number
from grpo_eqx.objective.aggregation import Totals, token_weights
from grpo_eqx.objective.kl import kl_estimates
from grpo_eqx.objective.metrics import Metrics, MetricsRecorder
from grpo_eqx.objective.policy_loss import (
    PolicyLoss,
    cispo_loss,
    clipped_loss,
    sapo_loss,
)
from grpo_eqx.objective.ratios import (
    bounded_exp,
    off_policy_keep,
    policy_ratios,
    sampler_weights,
)


class TokenBatch(NamedTuple):
    """Per-token data of a (micro-)batch. Values where `mask` is False never count."""

    logps: Float[Array, "P G Tc"]
    """Log-probs under the policy that is trained."""
    entropies: Float[Array, "P G Tc"]
    """Entropy of the policy's distribution at each token."""
    sampler_logps: Float[Array, "P G Tc"]
    """Log-probs under the distribution that the tokens were drawn from."""
    advantages: Float[Array, "P G"]
    mask: Bool[Array, "P G Tc"]
    """True for tokens that count."""
    policy_mask: Bool[Array, "P G Tc"] | None = None
    """True for tokens that the policy term and entropy bonus act on. `None`: all that count."""
    old_logps: Float[Array, "P G Tc"] | None = None
    """Log-probs under the policy before the step's updates. `None`: the policy itself."""
    ref_logps: Float[Array, "P G Tc"] | None = None
    """Log-probs under the reference policy; required with `beta`."""


def _none_if_zero(number: Number | None) -> Number | None:
    return None if number == 0 else number


class Objective(eqx.Module):
    """GRPO's objective and its variants, with the resolved values of `GRPOConfig`'s fields.

    Its numbers are data for `jax.jit`: others compile nothing again. A term without a weight is
    `None`, and left out of the program.
    """

    _: dataclasses.KW_ONLY

    loss_type: LossType = eqx.field(static=True, default="dapo")
    importance_sampling_level: ImportanceSamplingLevel = eqx.field(static=True, default="token")
    epsilon: Number = 0.2
    epsilon_high: Number = 0.2
    delta: Number | None = None
    dual_clip: Number | None = None
    sapo_temperature_pos: Number = 1.0
    sapo_temperature_neg: Number = 1.05
    beta: Number | None = eqx.field(default=None, converter=_none_if_zero)
    kl_estimator: KLEstimator = eqx.field(static=True, default="k3")
    kl_clamp: Number | None = None
    use_bias_correction_kl: bool = eqx.field(static=True, default=True)
    importance_sampling_mode: SamplerCorrection | None = eqx.field(static=True, default=None)
    importance_sampling_clip_min: Number | None = None
    importance_sampling_clip_max: Number | None = None
    off_policy_mask_threshold: Number | None = None
    entropy_coef: Number | None = eqx.field(default=None, converter=_none_if_zero)
    max_completion_length: int | None = eqx.field(static=True, default=None)
    """Length that `dr_grpo` divides its sums by; required there."""

    def __call__(self, batch: TokenBatch, totals: Totals) -> tuple[Float[Array, ""], Metrics]:
        """Returns this micro-batch's part of the optimizer step's loss, and its metrics.

        Per token: the policy loss, of ratios to the policy before the updates or, if coupled, to
        the sampler; times the off-policy and policy masks and the sampler correction; plus `beta`
        times the KL estimate. This is aggregated with `token_weights`, less `entropy_coef` times
        the mean entropy of the tokens that the policy term acts on.
        """
        batch = _without_padding(batch)
        old_logps = jax.lax.stop_gradient(
            batch.logps if batch.old_logps is None else batch.old_logps
        )
        is_coupled = self.importance_sampling_mode == "coupled"
        ratios = policy_ratios(
            batch.logps,
            batch.sampler_logps if is_coupled else old_logps,
            batch.mask,
            self.importance_sampling_level,
        )
        policy = self._policy_loss(batch, ratios)
        correction = self._sampler_weights(batch, old_logps)
        policy_mask = batch.mask if batch.policy_mask is None else batch.policy_mask & batch.mask
        scale = self._scale(batch, policy_mask, correction)
        weights = token_weights(batch.mask, self.loss_type, totals, self.max_completion_length)
        loss = jnp.sum(weights * scale * policy.losses)

        metrics = MetricsRecorder(batch.mask, totals)
        if self.beta is not None:
            kl = self._kl(batch, ratios)
            metrics.mean("kl", kl)
            loss += self.beta * jnp.sum(weights * kl)
        if self.entropy_coef is not None:
            metrics.add("policy_loss", loss)
            entropy = jnp.sum(batch.entropies, where=policy_mask)
            loss -= self.entropy_coef * entropy / jnp.maximum(totals.policy_tokens, 1)
        metrics.add("loss", loss)
        metrics.mean("entropy", batch.entropies)
        metrics.mean_min_max("policy_ratio", ratios)
        self._record_clipping(metrics, policy)
        metrics.mean_max(
            "sampling/sampling_logp_difference", jnp.abs(old_logps - batch.sampler_logps)
        )
        importance = correction
        if importance is None:
            importance = bounded_exp(old_logps - batch.sampler_logps)
        metrics.mean_min_max("sampling/importance_sampling_ratio", importance)
        effective = (scale != 0) & (batch.advantages[..., None] != 0)
        metrics.add("effective_batch/completions", effective.any(axis=-1).sum())
        metrics.add("effective_batch/tokens", effective.sum())
        return loss, metrics.finish()

    def _policy_loss(self, batch: TokenBatch, ratios: Float[Array, "P G W"]) -> PolicyLoss:
        if self.loss_type == "cispo":
            return cispo_loss(batch.logps, ratios, batch.advantages, epsilon_high=self.epsilon_high)
        if self.loss_type == "sapo":
            return sapo_loss(
                ratios,
                batch.advantages,
                temperature_pos=self.sapo_temperature_pos,
                temperature_neg=self.sapo_temperature_neg,
            )
        return clipped_loss(
            ratios,
            batch.advantages,
            epsilon=self.epsilon,
            epsilon_high=self.epsilon_high,
            delta=self.delta,
            dual_clip=self.dual_clip,
        )

    def _sampler_weights(
        self, batch: TokenBatch, old_logps: Float[Array, "P G Tc"]
    ) -> Float[Array, "P G W"] | None:
        if self.importance_sampling_mode not in SAMPLER_WEIGHTS:
            return None
        return sampler_weights(
            old_logps,
            batch.sampler_logps,
            batch.mask,
            self.importance_sampling_mode,
            self.importance_sampling_clip_min,
            self.importance_sampling_clip_max,
        )

    def _scale(
        self,
        batch: TokenBatch,
        policy_mask: Bool[Array, "P G Tc"],
        correction: Float[Array, "P G W"] | None,
    ) -> Float[Array, "P G Tc"]:
        """Returns the factor of the policy losses: masks times the sampler correction."""
        scale = policy_mask.astype(jnp.float32)
        if self.off_policy_mask_threshold is not None:
            scale *= off_policy_keep(
                batch.logps,
                batch.sampler_logps,
                batch.mask,
                batch.advantages,
                self.off_policy_mask_threshold,
            )
        return scale if correction is None else scale * correction

    def _kl(self, batch: TokenBatch, ratios: Float[Array, "P G W"]) -> Float[Array, "P G Tc"]:
        """Returns KL estimates, times the ratio where their gradient is to be unbiased.

        For token ratios, the correction is that of DeepSeek-V3.2 (arXiv 2512.02556, eq. 7); at
        level `sequence` it is TRL's, with the sequence's ratio for each of its tokens.
        """
        assert batch.ref_logps is not None, "beta is given, but ref_logps is None"
        kl = kl_estimates(batch.logps, batch.ref_logps, self.kl_estimator, self.kl_clamp)
        return kl * ratios if self.use_bias_correction_kl else kl

    def _record_clipping(self, metrics: MetricsRecorder, policy: PolicyLoss) -> None:
        low, high = policy.clipped_low, policy.clipped_high
        if self.loss_type == "cispo":
            metrics.mean("cispo_clip_ratio", high)
        elif self.loss_type in CLIPPED_LOSSES:
            metrics.mean("clip_ratio/low_mean", low)
            metrics.sequence_min("clip_ratio/low_min", low)
            metrics.mean("clip_ratio/high_mean", high)
            metrics.sequence_max("clip_ratio/high_max", high)
            metrics.mean("clip_ratio/region_mean", low | high)


def _without_padding(batch: TokenBatch) -> TokenBatch:
    """Zeros masked positions: nothing in them, not even NaN, may reach a gradient."""

    def clean(x: Array) -> Array:
        return jnp.where(batch.mask, x, 0.0)

    return batch._replace(
        logps=clean(batch.logps),
        entropies=clean(batch.entropies),
        sampler_logps=clean(batch.sampler_logps),
        old_logps=None if batch.old_logps is None else clean(batch.old_logps),
        ref_logps=None if batch.ref_logps is None else clean(batch.ref_logps),
    )
