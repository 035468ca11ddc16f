"""GRPO's loss for people who have logits already, in loops of their own."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from grpo_eqx.loss_backends.base import in_vocabulary
from grpo_eqx.loss_backends.logits import stats_of_logits
from grpo_eqx.objective import Objective, TokenBatch, Totals

IGNORED = -100


def grpo_loss(
    logits: Float[Array, "B T V"],
    ids: Int[Array, "B T"],
    advantages: Float[Array, " B"],
    mask: Bool[Array, "B T"] | None = None,
    *,
    old_logps: Float[Array, "B T"] | None = None,
    ref_logps: Float[Array, "B T"] | None = None,
    sampler_logps: Float[Array, "B T"] | None = None,
    temperature: float = 1.0,
    objective: Objective | None = None,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """The loss of a batch of completions and its metrics, from the logits that predict `ids`.

    The gradient has the dtype of the logits, of whose size nothing else is kept for it. Where a
    token does not count it is 0, whatever the logits are.

    **Arguments:**

    - `logits`: before the temperature; `logits[:, t]` predicts `ids[:, t]`.
    - `ids`: the completions' tokens. Those outside the vocabulary (-100, say) do not count.
    - `advantages`: one for each completion.
    - `mask`: True on the tokens that count. `None`: all.
    - `old_logps`: log-probs under the policy that ratios are against, off-policy. `None` is
      on-policy: the ratios are 1, and the gradient is that of the policy itself.
    - `ref_logps`: log-probs under the reference policy, for objectives whose `beta` is not 0.
    - `sampler_logps`: log-probs under the distribution that `ids` were drawn from. `None`: the
      old policy's.
    - `temperature`: divides the logits.
    - `objective`: the variant; `None` is the default `Objective`: clipped at 0.2 on both sides,
      the mean over all tokens (arXiv 2503.14476, eq. 8).
    """
    objective = Objective() if objective is None else objective
    counted = in_vocabulary(ids, logits.shape[-1])
    counted = counted if mask is None else counted & mask
    stats = stats_of_logits(logits, jnp.where(counted, ids, IGNORED), temperature)
    if sampler_logps is None:
        sampler_logps = jax.lax.stop_gradient(stats.logps) if old_logps is None else old_logps

    def grouped(x: Array | None) -> Array | None:
        """With an axis for groups: the batch as one of them."""
        return None if x is None else x[None]

    batch = TokenBatch(
        logps=stats.logps[None],
        entropies=stats.entropies[None],
        sampler_logps=sampler_logps[None],
        advantages=advantages[None],
        mask=counted[None],
        old_logps=grouped(old_logps),
        ref_logps=grouped(ref_logps),
    )
    loss, metrics = objective(batch, Totals.of(batch.mask, batch.mask))
    return loss, jax.tree.map(lambda x: x[None], metrics).merged()
