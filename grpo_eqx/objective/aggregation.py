"""Aggregation of token losses into an optimizer step's loss, a weighted sum over its batch."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from grpo_eqx.common.choices import LossType


class Totals(NamedTuple):
    """Counts over the whole batch of an optimizer step, on all devices and hosts."""

    sequences: Float[Array, ""]
    filled_sequences: Float[Array, ""]
    """Sequences with any unmasked token."""
    tokens: Float[Array, ""]
    """Unmasked tokens."""
    policy_tokens: Float[Array, ""]
    """Unmasked tokens that the policy term acts on."""
    tokens_per_update: Float[Array, ""]
    """Unmasked tokens of the whole rollout, divided by the number of updates that share it."""

    @classmethod
    def of(
        cls,
        mask: Bool[Array, "P G Tc"],
        policy_mask: Bool[Array, "P G Tc"],
        tokens_per_update: Float[Array, ""] | None = None,
    ) -> "Totals":
        """Counts a whole batch.

        **Arguments:**

        - `mask`, `policy_mask`: tokens that count, and tokens that the policy term acts on.
        - `tokens_per_update`: the field; by default for a batch that is the whole rollout.
        """
        acted_on = policy_mask & mask
        counts = (
            jnp.asarray(mask[..., 0].size), mask.any(axis=-1).sum(), mask.sum(), acted_on.sum(),
            jnp.maximum(mask.sum(), 1) if tokens_per_update is None else tokens_per_update,
        )  # fmt: skip
        return cls(*(count.astype(jnp.float32) for count in counts))


def token_weights(
    mask: Bool[Array, "P G Tc"],
    loss_type: LossType,
    totals: Totals,
    max_completion_length: int | None,
) -> Float[Array, "P G Tc"]:
    """Returns each token's weight; the loss is the weighted sum over all micro-batches.

    - `grpo`, `sapo`: the mean over sequences of each sequence's mean over its tokens
      (arXiv 2402.03300, eq. 3).
    - `dapo`, `cispo`: the sum over tokens, divided by the mean number of tokens of the rollout's
      updates, as in TRL: a token counts the same in any update. With one update per rollout, this
      is the mean over all tokens. (DAPO, arXiv 2503.14476, eq. 8, and CISPO, arXiv 2506.13585,
      eq. 4, divide by the tokens of one prompt's group; DAPO's own code by those of the update.)
    - `bnpo`: the mean over the tokens of the update. TRL's "local batch" is a device's; here
      nothing depends on how an update is split.
    - `dr_grpo`: the sum over tokens, divided by the number of sequences times
      `max_completion_length` (arXiv 2503.20783).

    **Arguments:**

    - `mask`: tokens that count.
    - `loss_type`: one of the names above.
    - `totals`: counts of the whole batch of the optimizer step.
    - `max_completion_length`: most tokens of a completion, which only `dr_grpo` needs.
    """
    weights = mask.astype(jnp.float32)
    if loss_type in ("grpo", "sapo"):
        lengths = jnp.maximum(weights.sum(axis=-1, keepdims=True), 1)
        return weights / lengths / totals.sequences
    if loss_type == "dr_grpo":
        assert max_completion_length is not None, "dr_grpo needs max_completion_length"
        return weights / (totals.sequences * max_completion_length)
    if loss_type == "bnpo":
        return weights / jnp.maximum(totals.tokens, 1)
    return weights / totals.tokens_per_update
