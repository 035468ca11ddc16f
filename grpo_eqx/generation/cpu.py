"""Forms of the model and its caches in which CPUs decode faster, and which nothing else uses.

On one workload of `benchmarks/step.py` at least, each makes a whole step 5 % faster.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int8

from grpo_eqx.generation.engine import DecodingForm
from grpo_eqx.models.interface import CausalLM
from grpo_eqx.models.kv_cache import CACHE_BLOCK, GrowingCache, KVCache
from grpo_eqx.models.layers import Linear
from grpo_eqx.models.product import product
from grpo_eqx.models.prompt_cache import PromptCache

_MOST_PARTS = 4
"""Limit on the parts of a growing cache. Each is one more loop to compile for each layer and number
of slots."""


class CpuDecoding(DecodingForm):
    """Each layer as a stack of its own, with transposed weights, and caches of other forms.

    A CPU would copy the weights, keys and values of a layer out of a larger stack at every step.
    """

    def __call__(self, model: CausalLM, prompts: PromptCache) -> tuple[CausalLM, PromptCache]:
        layers = jax.tree.map(
            lambda x: TransposedLinear.of(x) if isinstance(x, Linear) else x,
            model.layers,
            is_leaf=lambda x: isinstance(x, Linear),
        )
        assert isinstance(prompts.kv, list)
        (cache,) = prompts.kv
        number = model.config.num_hidden_layers
        layers, caches = _one_by_one(layers, number), _one_by_one(KeysByElement.of(cache), number)
        return eqx.tree_at(lambda model: model.layers, model, layers), prompts._replace(kv=caches)

    def num_parts(self, cache_length: int) -> int:
        return _num_parts(cache_length)


def _one_by_one(stack: Any, number: int) -> list[Any]:
    """Cuts a stack of layers into stacks of one layer each."""
    return [jax.tree.map(lambda x, i=i: x[i : i + 1], stack) for i in range(number)]


class TransposedLinear(eqx.Module):
    """A `Linear` with weight `[in, out]`, whose products with few rows are faster."""

    weight: Float[Array, "*stack in out"] | Int8[Array, "*stack in out"]
    bias: Float[Array, "*stack out"] | None
    scales: Float[Array, "*stack out"] | None

    @classmethod
    def of(cls, linear: Linear) -> "TransposedLinear":
        assert linear.adapter is None, "sampling merges adapters"
        return cls(linear.weight.swapaxes(-1, -2), linear.bias, linear.scales)

    def __call__(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"]:
        y = jnp.einsum("...i,io->...o", x, self.weight.astype(x.dtype))
        if self.scales is not None:
            y = (y * self.scales).astype(x.dtype)
        return y if self.bias is None else y + self.bias


class KeysByElement(KVCache):
    """Cache with keys as `[*layers, P, J, K, D, S]`: scores of few queries are faster."""

    keys: Float[Array, "*layers P J K D S"] | Int8[Array, "*layers P J K D S"]
    values: Float[Array, "*layers P J K S D"] | Int8[Array, "*layers P J K S D"]
    key_scales: Float[Array, "*layers P J K 1 S"] | None
    value_scales: Float[Array, "*layers P J K S 1"] | None

    @classmethod
    def of(cls, cache: KVCache) -> "KeysByElement":
        of_keys = cache.keys, cache.key_scales
        keys, key_scales = jax.tree.map(lambda x: x.swapaxes(-1, -2), of_keys)
        return cls(keys, cache.values, key_scales, cache.value_scales)

    @property
    def key_axis(self) -> int:
        return -1

    @property
    def blocks_of_row(self) -> int:
        return 1

    def scores(self, queries: Float[Array, "P J K r D"]) -> Float[Array, "P J K r S"]:
        return product("pjkrd,pjkds->pjkrs", queries, self.keys)

    def growing(self, rows: int, slots: int, length: int) -> GrowingCache:
        """Returns an empty cache in parts, all of which but the last have one block.

        A CPU reads such a part where it is. One block of a longer part is copied first.
        """
        number = _num_parts(length)
        sizes = [CACHE_BLOCK] * (number - 1) + [length - CACHE_BLOCK * (number - 1)]
        return GrowingCache(tuple(self.empty(rows, slots, size) for size in sizes))


def _num_parts(cache_length: int) -> int:
    """Returns the number of parts of a growing cache."""
    return min(-(-cache_length // CACHE_BLOCK), _MOST_PARTS)
