"""Importance ratios between policies, per token or per sequence."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from grpo_eqx.common.choices import (
    ImportanceSamplingLevel,
    SamplerCorrection,
)
from grpo_eqx.common.shapes import Number

MAX_EXPONENT = 20.0
"""Bound on log-ratios; far beyond it, ratios only bring overflow and NaN."""


def bounded_exp(log_ratios: Float[Array, "..."]) -> Float[Array, "..."]:
    """Exponentiates log-ratios clamped to [-20, 20], beyond which no gradient flows."""
    return jnp.exp(jnp.clip(log_ratios, -MAX_EXPONENT, MAX_EXPONENT))


def policy_ratios(
    logps: Float[Array, "P G Tc"],
    old_logps: Float[Array, "P G Tc"],
    mask: Bool[Array, "P G Tc"],
    level: ImportanceSamplingLevel,
) -> Float[Array, "P G W"]:
    """Returns ratios of the policy to that of `old_logps`; `W` is `Tc`, or 1 for `sequence`.

    Logarithms are clamped to [-20, 20].

    - `token`: each token's own ratio (PPO, arXiv 1707.06347).
    - `sequence`: the geometric mean over the sequence's tokens (GSPO, arXiv 2507.18071, eq. 7).
    - `sequence_token`: the same value at every token, with the gradient of the token's own log-prob
      (GSPO-token, eq. 14). Equal to `sequence` if all tokens of a sequence have one weight.
    """
    log_ratios = logps - old_logps
    if level == "token":
        return bounded_exp(log_ratios)
    lengths = jnp.maximum(mask.sum(axis=-1, keepdims=True), 1)
    of_sequence = bounded_exp(jnp.sum(log_ratios, axis=-1, keepdims=True, where=mask) / lengths)
    if level == "sequence":
        return of_sequence
    # A number minus its own constant is exactly 0, with the number's gradient.
    return jax.lax.stop_gradient(of_sequence) * jnp.exp(logps - jax.lax.stop_gradient(logps))


def sampler_weights(
    old_logps: Float[Array, "P G Tc"],
    sampler_logps: Float[Array, "P G Tc"],
    mask: Bool[Array, "P G Tc"],
    mode: SamplerCorrection,
    clip_min: Number | None,
    clip_max: Number | None,
) -> Float[Array, "P G W"]:
    r"""Returns weights for tokens the sampler drew from a distribution other than the trainer's.

    A weight is $e^{\ell_{\text{old}} - \ell_{\text{sampler}}}$ of the token, or of the whole
    sequence (the product over its tokens; `W` is then 1). `*_truncate` clamps it to
    [clip_min, clip_max], `*_mask` sets it to 0 outside (truncated and masked importance sampling,
    as in TRL). No gradient flows.
    """
    level, how = mode.split("_")
    log_ratios = jnp.where(mask, old_logps - sampler_logps, 0.0)
    if level == "sequence":
        log_ratios = log_ratios.sum(axis=-1, keepdims=True)
    ratios = jax.lax.stop_gradient(bounded_exp(log_ratios))
    low = 0.0 if clip_min is None else clip_min
    high = jnp.inf if clip_max is None else clip_max
    if how == "truncate":
        return jnp.clip(ratios, low, high)
    return jnp.where((ratios < low) | (ratios > high), 0.0, ratios)


def off_policy_keep(
    logps: Float[Array, "P G Tc"],
    sampler_logps: Float[Array, "P G Tc"],
    mask: Bool[Array, "P G Tc"],
    advantages: Float[Array, "P G"],
    threshold: Number,
) -> Bool[Array, "P G 1"]:
    """Returns False for sequences of negative advantage that the policy has moved away from.

    These are the ones whose mean of `sampler_logps - logps` over their tokens exceeds the
    threshold (off-policy sequence masking, DeepSeek-V3.2, arXiv 2512.02556, eq. 9).
    """
    lengths = jnp.maximum(mask.sum(axis=-1), 1)
    drift = jnp.sum(sampler_logps - logps, axis=-1, where=mask) / lengths
    return ((advantages >= 0) | (drift <= threshold))[..., None]
