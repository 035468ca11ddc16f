"""Values of a prompt that its group's completions share."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Integer

from grpo_eqx.models.attention import Segment
from grpo_eqx.models.kv_cache import KeyValues, KVCache, StoredKV


class PromptCache(NamedTuple):
    """Prompt state that a group's completions need.

    A prompt's last token is left to its completions as their first input, so that the sampler and
    the trainer both compute that position with the completion, and a prefill yields no hidden
    states.
    """

    kv: KeyValues | list[KVCache]
    """As read, with a leading axis of layers; for decoding, one cache per stack of layers."""
    visible: Bool[Array, "P Tp"]
    """True on the prompt's own tokens, except the last."""
    last_ids: Int[Array, " P"]
    last_positions: Int[Array, " P"]
    routes: Integer[Array, "P Tp Lk"] | None = None
    """Experts that routers chose for each token, of models with experts."""

    def stored(self, dtype: jnp.dtype | None = None, head_multiple: int = 1) -> "PromptCache":
        """Returns the cache for decoding, with keys and values in `dtype` (`None`: their own).

        Heads have zeros after them up to a multiple of `head_multiple` elements. It has no routes:
        decoding does not read them.
        """
        assert isinstance(self.kv, KeyValues)
        dtype = self.kv.keys.dtype if dtype is None else dtype
        return self._replace(kv=[StoredKV.of(self.kv.filled(head_multiple), dtype)], routes=None)

    def picked(self, within: Int[Array, "parts n"]) -> "PromptCache":
        """Gathers prompts from each equal part of the batch, without cross-device traffic."""
        parts = len(within)

        def pick(x: Array, axis: int = 0) -> Array:
            x = jnp.moveaxis(x, axis, 0)
            pieces = x.reshape(parts, -1, *x.shape[1:])
            picked = jax.vmap(lambda piece, i: piece[i])(pieces, within)
            return jnp.moveaxis(picked.reshape(-1, *x.shape[1:]), 0, axis)

        return self.mapped(pick)

    def mapped(self, func: Callable[..., Array], *others: "PromptCache") -> "PromptCache":
        """Maps `func` over the arrays of this and other caches; keys have prompts on `axis=1`."""
        kv = jax.tree.map(functools.partial(func, axis=1), self.kv, *(x.kv for x in others))
        return PromptCache(kv, *jax.tree.map(func, self[1:], *(x[1:] for x in others)))

    def segment(
        self,
        layer_kv: KVCache,
        positions: Int[Array, "P G T"],
        window: Int[Array, ""] | None,
    ) -> Segment:
        """Returns one layer's keys and values, with a mask of what completions see of them.

        **Arguments:**

        - `layer_kv`: keys and values of the layer.
        - `positions`: positions of the completions' queries.
        - `window`: number of positions that a query sees, including its own; by default all.
        """
        visible = self.visible[:, None, None]
        if window is not None:
            own = jnp.cumsum(self.visible, axis=1, dtype=jnp.int32)[:, None, None] - 1
            visible &= own > positions[..., None] - window
        return Segment(layer_kv, visible)
