"""Estimates of the KL divergence to a reference policy, from the sampled tokens' log-probs."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from grpo_eqx.common.choices import KLEstimator
from grpo_eqx.common.shapes import Number
from grpo_eqx.objective.ratios import MAX_EXPONENT


def kl_estimates(
    logps: Float[Array, "P G Tc"],
    ref_logps: Float[Array, "P G Tc"],
    estimator: KLEstimator = "k3",
    clamp: Number | None = None,
) -> Float[Array, "P G Tc"]:
    r"""Estimates KL(policy || reference) for each token (http://joschu.net/blog/kl-approx.html).

    With $d$ = `logps - ref_logps`: `k1` is $d$, `k2` is $\frac{1}{2} d^2$, and `k3` is
    $e^{-d} + d - 1$, which GRPO uses (arXiv 2402.03300, eq. 4). As a loss, `k1` by itself has a
    gradient of mean zero, the gradient of `k2` is that of the divergence, and the gradient of `k3`
    approximates it near $d = 0$.

    For `k3`, $d$ is clamped to at least -20, which keeps the exponential finite; `clamp` bounds all
    estimates to [-clamp, clamp] (as verl does for `k3`, with 10). No gradient flows past a bound.
    """
    difference = logps - ref_logps
    if estimator == "k1":
        estimates = difference
    elif estimator == "k2":
        estimates = jnp.square(difference) / 2
    else:
        difference = jnp.maximum(difference, -MAX_EXPONENT)
        estimates = jnp.expm1(-difference) + difference
    return estimates if clamp is None else jnp.clip(estimates, -clamp, clamp)
