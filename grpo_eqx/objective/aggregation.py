"""From losses of tokens to the loss of an optimiser step, by weights that sum over its batch."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from grpo_eqx._types import LossType


class Totals(NamedTuple):
    """Counts over everything that one optimiser step sees, on all devices and hosts."""

    sequences: Float[Array, ""]
    filled_sequences: Float[Array, ""]
    """Sequences with any token that is not masked."""
    tokens: Float[Array, ""]
    """Tokens that are not masked."""
    policy_tokens: Float[Array, ""]
    """Those of them that the policy term acts on."""
    tokens_per_update: Float[Array, ""]
    """Tokens that are not masked of the whole rollout, over the number of updates that share it."""

    @classmethod
    def of(
        cls,
        mask: Bool[Array, "P G Tc"],
        policy_mask: Bool[Array, "P G Tc"],
        tokens_per_update: Float[Array, ""] | None = None,
    ) -> "Totals":
        """Counts a whole batch.

        **Arguments:** the tokens that count; those of them that the policy term acts on; the field
        `tokens_per_update`, by default for a batch that is the whole rollout.
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
    """What each token's loss counts for. Sums of weighted losses over micro-batches are the loss.

    - `grpo`, `sapo`: the mean over sequences of the mean over each one's tokens
      (arXiv 2402.03300, eq. 3).
    - `dapo`, `cispo`: the sum over tokens, by the mean tokens of the rollout's updates, as in TRL:
      a token counts the same in whichever update it is. Where the rollout has one update this is
      the mean over all tokens. (DAPO, arXiv 2503.14476, eq. 8, and CISPO, arXiv 2506.13585, eq. 4,
      divide by the tokens of one prompt's group; DAPO's own code by those of the update.)
    - `bnpo`: the mean over the tokens of the update. TRL's "local batch" is a device's; here
      nothing depends on how an update is cut.
    - `dr_grpo`: the sum over tokens, by sequences times `max_completion_length`
      (arXiv 2503.20783).
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
