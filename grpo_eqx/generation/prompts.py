"""Tokens of a batch's prompts, as the programs take them."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Integer

from grpo_eqx.common.shapes import PromptIds, PromptMask


class Prompts(eqx.Module):
    """`P` prompts, padded on either side."""

    ids: PromptIds
    """Tokens."""
    mask: PromptMask
    """True on the prompts' own tokens."""
    routes: Integer[Array, "P Tp Lk"] | None = None
    """Experts that the sampler's routers chose for each token; see `Rollout.routes`."""

    def __len__(self) -> int:
        """Returns the number of prompts."""
        return len(self.ids)

    def with_width(self, width: int, pad_id: int) -> "Prompts":
        """Returns the prompts padded on the right to `width` tokens."""
        pad = ((0, 0), (0, width - self.ids.shape[1]))
        return Prompts(
            jnp.pad(self.ids, pad, constant_values=pad_id),
            jnp.pad(jnp.asarray(self.mask), pad),
            None if self.routes is None else jnp.pad(self.routes, (*pad, (0, 0))),
        )


def map_prompts_and_completions(
    prompts: Callable[[Any], Any], completions: Callable[[Any], Any], tree: Any
) -> Any:
    """Maps the arrays of a tree: those of `Prompts`, `[P, ...]`, and all others, `[P, G, ...]`."""

    def mapped(node: Any) -> Any:
        return jax.tree.map(prompts, node) if isinstance(node, Prompts) else completions(node)

    return jax.tree.map(mapped, tree, is_leaf=lambda node: isinstance(node, Prompts))
