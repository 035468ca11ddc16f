"""GRPO's loss for custom training loops that already have logits."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from grpo_eqx.common.errors import UserError
from grpo_eqx.loss_backends.base import in_vocabulary
from grpo_eqx.loss_backends.logits import stats_of_logits
from grpo_eqx.objective import Objective, TokenBatch, Totals

IGNORED = -100


def grpo_loss(
    logits: Float[Array, "B T V"],
    ids: Int[Array, "B T"],
    advantages: Float[Array, " B"],
    mask: Bool[Array, "B T"] | Int[Array, "B T"] | Float[Array, "B T"] | None = None,
    *,
    old_logps: Float[Array, "B T"] | None = None,
    ref_logps: Float[Array, "B T"] | None = None,
    sampler_logps: Float[Array, "B T"] | None = None,
    temperature: float = 1.0,
    objective: Objective | None = None,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Computes the loss of a batch of completions and its metrics, from logits that predict `ids`.

    The gradient has the dtype of the logits; nothing else of their size is kept for it. It is 0 at
    tokens that do not count, whatever their logits.

    **Arguments:**

    - `logits`: before the temperature; `logits[:, t]` predicts `ids[:, t]`.
    - `ids`: the completions' tokens. Those outside the vocabulary (-100, say) do not count.
    - `advantages`: one for each completion.
    - `mask`: True, or not 0, for the tokens that count. `None`: all.
    - `old_logps`: log-probs under the policy that the ratios divide by, if off-policy. `None` is
      on-policy: the ratios are 1, and the gradient is that of the policy itself.
    - `ref_logps`: log-probs under the reference policy, for an objective with `beta`.
    - `sampler_logps`: log-probs under the distribution that `ids` were drawn from. `None`: the
      old policy's.
    - `temperature`: divides the logits.
    - `objective`: the variant; `None` is the default `Objective`: clipped at 0.2 on both sides,
      the mean over all tokens (arXiv 2503.14476, eq. 8).

    Raises `UserError` for incompatible arguments.
    """
    objective = Objective() if objective is None else objective
    _check(logits, ids, advantages, ref_logps, objective)
    counted = in_vocabulary(ids, logits.shape[-1])
    counted = counted if mask is None else counted & (mask != 0)
    stats = stats_of_logits(logits, jnp.where(counted, ids, IGNORED), temperature)
    if sampler_logps is None:
        sampler_logps = jax.lax.stop_gradient(stats.logps) if old_logps is None else old_logps
    batch = TokenBatch(
        logps=stats.logps,
        entropies=stats.entropies,
        sampler_logps=sampler_logps,
        advantages=advantages,
        mask=counted,
        old_logps=old_logps,
        ref_logps=ref_logps,
    )
    batch = jax.tree.map(lambda x: x[None], batch)  # as one group
    loss, metrics = objective(batch, Totals.of(batch.mask, batch.mask))
    return loss, metrics.values()


def _check(
    logits: Float[Array, "B T V"],
    ids: Int[Array, "B T"],
    advantages: Float[Array, " B"],
    ref_logps: Float[Array, "B T"] | None,
    objective: Objective,
) -> None:
    if logits.shape[:-1] != ids.shape or ids.shape[:1] != advantages.shape:
        raise UserError(
            f"logits {list(logits.shape)}, ids {list(ids.shape)} and advantages "
            f"{list(advantages.shape)} do not match: they must be [B, T, V], [B, T] and [B]."
        )
    if (objective.beta is None) != (ref_logps is None):
        fix = "pass ref_logps" if ref_logps is None else "leave ref_logps out"
        raise UserError(f"the objective's beta is {objective.beta or 0:g}: {fix}, or change beta.")
    if objective.loss_type == "dr_grpo" and objective.max_completion_length is None:
        raise UserError("dr_grpo divides by max_completion_length: set it in the Objective.")
