"""The policy loss, as plain arithmetic on per-token log-probs."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float


class TokenLoss(NamedTuple):
    """Per-token losses and what the clipping did."""

    losses: Float[Array, "P G Tc"]
    ratios: Float[Array, "P G Tc"]
    clipped_low: Float[Array, "P G Tc"]
    """1 where the ratio fell below the range at a negative advantage, so the gradient is cut."""
    clipped_high: Float[Array, "P G Tc"]
    """1 where the ratio rose above the range at a positive advantage."""


def clipped_policy_loss(
    logps: Float[Array, "P G Tc"],
    old_logps: Float[Array, "P G Tc"],
    advantages: Float[Array, "P G"],
    *,
    epsilon: float,
    epsilon_high: float,
) -> TokenLoss:
    """-min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A) with r = exp(logps - old_logps).

    PPO's clipped objective (arXiv 1707.06347, eq. 7), with DAPO's separate upper bound
    (arXiv 2503.14476, eq. 10).
    """
    advantage = advantages[..., None]
    ratios = jnp.exp(logps - old_logps)
    clipped = jnp.clip(ratios, 1 - epsilon, 1 + epsilon_high)
    return TokenLoss(
        losses=-jnp.minimum(ratios * advantage, clipped * advantage),
        ratios=ratios,
        clipped_low=((ratios < 1 - epsilon) & (advantage < 0)).astype(jnp.float32),
        clipped_high=((ratios > 1 + epsilon_high) & (advantage > 0)).astype(jnp.float32),
    )
