"""The batch of an update."""

import equinox as eqx
import jax

from grpo_eqx._types import GroupFloats, TokenFloats
from grpo_eqx.generation import Rollout
from grpo_eqx.training.packing import Packing


class Batch(eqx.Module):
    """What an update learns from: `P` prompts with `G` completions each."""

    rollout: Rollout
    advantages: GroupFloats
    old_logps: TokenFloats | None = None
    """Log-probs under the policy that ratios are against. `None`: the policy being updated, so
    that ratios are exactly 1 and no extra forward pass is needed."""
    ref_logps: TokenFloats | None = None
    """Log-probs under the reference model, for the KL term."""
    entropies: TokenFloats | None = None
    """Entropies of the policy being updated, where only tokens with high ones are to count."""
    packing: Packing | None = None
    """How completions share rows in the forward pass. `None`: each has a row of its own."""

    def share(self, index: int, count: int) -> "Batch":
        """Every `count`-th prompt with its group, from prompt `index` on.

        Strided, so that devices with at least `count` prompts keep theirs.
        """
        return jax.tree.map(lambda x: x[index::count], self)
