"""Policy losses of individual tokens, from ratios and advantages."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from grpo_eqx.common.shapes import Number


class PolicyLoss(NamedTuple):
    """Policy losses, with masks of where clipping removes or caps their gradient."""

    losses: Float[Array, "P G W"]
    clipped_low: Bool[Array, "P G W"]
    """The ratio is below the range and the advantage negative."""
    clipped_high: Bool[Array, "P G W"]
    """The ratio is above the range and the advantage positive."""


def clipped_loss(
    ratios: Float[Array, "P G W"],
    advantages: Float[Array, "P G"],
    *,
    epsilon: Number,
    epsilon_high: Number,
    delta: Number | None = None,
    dual_clip: Number | None = None,
) -> PolicyLoss:
    r"""Computes PPO's clipped objective, with up to two more bounds:

    $$-\min\bigl(\min(r, \delta)\, A,\ \operatorname{clip}(r, 1 - \epsilon,
    1 + \epsilon_{\text{high}})\, A\bigr)$$

    PPO's own (arXiv 1707.06347, eq. 7), with DAPO's separate upper bound
    (arXiv 2503.14476, eq. 10) and INTELLECT-2's cap on large ratios (`delta`, arXiv 2505.07291,
    eq. 3). `dual_clip` (c) bounds the loss at negative advantages by $-c A$ (dual-clip PPO,
    arXiv 1912.09729, eq. 5; verl's `clip_ratio_c`), which is the same as `delta` where the clipping
    range lies below c.
    """
    advantage = advantages[..., None]
    clipped = jnp.clip(ratios, 1 - epsilon, 1 + epsilon_high)
    capped = ratios if delta is None else jnp.minimum(ratios, delta)
    losses = -jnp.minimum(capped * advantage, clipped * advantage)
    if dual_clip is not None:
        bound = jnp.where(advantage < 0, -dual_clip * advantage, jnp.inf)
        losses = jnp.minimum(losses, bound)
    return PolicyLoss(
        losses,
        clipped_low=(ratios < 1 - epsilon) & (advantage < 0),
        clipped_high=(ratios > 1 + epsilon_high) & (advantage > 0),
    )


def cispo_loss(
    logps: Float[Array, "P G Tc"],
    ratios: Float[Array, "P G W"],
    advantages: Float[Array, "P G"],
    *,
    epsilon_high: Number,
) -> PolicyLoss:
    r"""Computes log-probs weighted by ratios that are capped and have no gradient of their own:

    $$-\operatorname{sg}(\min(r, \epsilon_{\text{high}}))\, A\, \ell$$

    Every token keeps its gradient. CISPO (MiniMax-M1, arXiv 2506.13585, eq. 4 and 5), without the
    lower bound, as the authors ran it. `epsilon_high` is TRL's: the cap on the ratio itself,
    written $1 + \epsilon_{\text{high}}$ in the paper.
    """
    advantage = advantages[..., None]
    capped = jax.lax.stop_gradient(jnp.minimum(ratios, epsilon_high))
    clipped_high = (ratios > epsilon_high) & (advantage > 0)
    return PolicyLoss(-capped * advantage * logps, jnp.zeros_like(clipped_high), clipped_high)


def sapo_loss(
    ratios: Float[Array, "P G W"],
    advantages: Float[Array, "P G"],
    *,
    temperature_pos: Number,
    temperature_neg: Number,
) -> PolicyLoss:
    r"""Computes the loss with a soft gate in place of clipping:

    $$-\frac{4}{\tau}\, \sigma(\tau (r - 1))\, A$$

    SAPO (arXiv 2511.20347, eq. 6), with one $\tau$ for positive advantages and another for the
    rest.
    """
    advantage = advantages[..., None]
    tau = jnp.where(advantage > 0, temperature_pos, temperature_neg)
    nowhere = jnp.zeros(ratios.shape, bool)
    return PolicyLoss(-jax.nn.sigmoid(tau * (ratios - 1)) * (4 / tau) * advantage, nowhere, nowhere)
