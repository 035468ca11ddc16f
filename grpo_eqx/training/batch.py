"""Batch of an update."""

from typing import Any

import equinox as eqx
import jax

from grpo_eqx.common.shapes import GroupFloats, TokenFloats
from grpo_eqx.generation import Rollout
from grpo_eqx.sharding.rules import last_dim_sharding, replicated


class Batch(eqx.Module):
    """Training data of one update: `P` prompts with `G` completions each."""

    rollout: Rollout
    advantages: GroupFloats
    old_logps: TokenFloats | None = None
    """Log-probs under the policy that ratios are relative to. `None`: the policy being updated, so
    that ratios are exactly 1 and no extra forward pass is needed."""
    ref_logps: TokenFloats | None = None
    """Log-probs under the reference model, for the KL term."""
    entropies: TokenFloats | None = None
    """Entropies of the policy being updated, needed if only high-entropy tokens count."""

    def share(self, index: int, count: int) -> "Batch":
        """Returns every `count`-th prompt with its group, starting at prompt `index`."""
        return jax.tree.map(lambda x: x[index::count], self)


def gathered_shardings(tree: Any, mesh: jax.sharding.Mesh) -> Any:
    """Returns shardings of a batch's arrays, or their shapes, of which rows take any part.

    Each device has a copy of the tokens, which are few. Routes are many, and split by layer.
    """

    def of(
        path: tuple[Any, ...], x: jax.Array | jax.ShapeDtypeStruct
    ) -> jax.sharding.NamedSharding:
        is_routes = getattr(path[-1], "name", None) == "routes"
        return last_dim_sharding(mesh, x.shape) if is_routes else replicated(mesh)

    return jax.tree.map_with_path(of, tree)
