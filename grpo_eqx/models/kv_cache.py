"""Keys and values of past positions, as attention computes them and as they are stored."""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int8

from grpo_eqx.models.rounding import rounded_rows
from grpo_eqx.models.tiles import filled
from grpo_eqx.sharding.rollout_layout import RolloutLayout

CACHE_BLOCK = 128
"""Number of positions of a growing cache that attention reads at a time."""
_MOST_PARTS = 4
"""Limit on the parts of a growing cache. Each is one more loop to compile for each layer and number
of slots."""


class KeyValues(NamedTuple):
    """Keys and values, of `J` rows per prompt: `J = 1` where the group shares them, else `J = G`.

    Attention over whole rows has no axis `J`.
    """

    keys: Float[Array, "*rows K S D"]
    values: Float[Array, "*rows K S D"]

    def filled(self, multiple: int) -> "KeyValues":
        """Returns them with zeros after each head, up to a multiple of so many elements."""
        return KeyValues(*(filled(x, -1, multiple) for x in self))


def positions_read(num_written: Int[Array, ""], cache_length: int) -> Int[Array, ""]:
    """Returns how many of a growing cache's positions attention reads: whole blocks."""
    if cache_length <= CACHE_BLOCK:
        return jnp.int32(cache_length)
    return (num_written + CACHE_BLOCK - 1) // CACHE_BLOCK * CACHE_BLOCK


class KVCache(NamedTuple):
    """Stored keys and values: in a float dtype, or as int8 with a scale per head and position.

    Heads may be stored with zeros after them (`KeyValues.filled`).
    """

    keys: Float[Array, "*layers P J K S D"] | Int8[Array, "*layers P J K S D"]
    values: Float[Array, "*layers P J K S D"] | Int8[Array, "*layers P J K S D"]
    key_scales: Float[Array, "*layers P J K S 1"] | None = None
    value_scales: Float[Array, "*layers P J K S 1"] | None = None

    @classmethod
    def of(cls, kv: KeyValues, dtype: jnp.dtype) -> "KVCache":
        """Rounds to `dtype`; for int8, the largest magnitude per head and position becomes 127."""
        if dtype != jnp.int8:
            return cls(*(x.astype(dtype) for x in kv))
        (keys, key_scales), (values, value_scales) = (rounded_rows(x) for x in kv)
        return cls(keys, values, key_scales[..., None], value_scales[..., None])

    def written(
        self,
        new: KeyValues,
        layer: Int[Array, ""],
        position: Int[Array, "P J"],
        layout: RolloutLayout | None = None,
    ) -> "KVCache":
        """Returns the cache of all layers with one position of each row replaced, in one layer.

        **Arguments:** keys and values of single positions, `[P, J, K, 1, D]`, filled here as the
        cache is; the layer; where each row's is written, nowhere if that is past the end; the
        layout over devices.
        """

        def write(cache: Array, token: Array, layer: Array, position: Array) -> Array:
            P, J, K = token.shape[:3]
            row, column = jnp.arange(P)[:, None], jnp.arange(J)
            if cache.dtype != jnp.int8:
                where = layer, row, column, slice(None), position
                return cache.at[where].set(token[..., 0, :], mode="drop")
            # Head by head: to write several at once, a TPU's compiler would lay int8 numbers out in
            # another way than attention reads them, and copy the cache for each token and layer.
            by_head = row[..., None], column[:, None], jnp.arange(K), position[..., None]
            return cache.at[layer, *by_head].set(token[..., 0, :], mode="drop")

        if layout is not None:
            row = layout.prompts, layout.groups
            of_token = *row, layout.heads(new.keys.shape[2])
            write = layout.on_each_device(
                write, [((), *of_token), of_token, (), row], ((), *of_token)
            )
        return jax.tree.map(
            lambda cache, token: write(cache, token, layer, position),
            self,
            KVCache.of(new.filled(self.keys.shape[-1]), self.keys.dtype),
        )

    def unstacked(self) -> "list[KVCache]":
        """Returns a cache for each layer, with a leading axis of one layer."""
        return [jax.tree.map(lambda x, i=i: x[i : i + 1], self) for i in range(len(self.keys))]

    def loaded(self, dtype: jnp.dtype) -> KeyValues:
        """Returns keys and values in `dtype`, the one that attention computes in."""
        if self.key_scales is None or self.value_scales is None:
            return KeyValues(self.keys.astype(dtype), self.values.astype(dtype))
        keys, values = self.keys * self.key_scales, self.values * self.value_scales
        return KeyValues(keys.astype(dtype), values.astype(dtype))


class GrowingCache(NamedTuple):
    """Keys and values of completions so far, in parts: runs of successive positions.

    A part has whole blocks of `CACHE_BLOCK` positions; a shorter one is the only one.
    """

    parts: tuple[KVCache, ...]

    @property
    def length(self) -> int:
        """Number of positions."""
        return sum(part.keys.shape[-2] for part in self.parts)

    def placed(self) -> list[tuple[int, KVCache]]:
        """Returns the parts, each with its first position."""
        sizes = (part.keys.shape[-2] for part in self.parts)
        return list(zip(itertools.accumulate(sizes, initial=0), self.parts, strict=False))

    def written(
        self,
        new: KeyValues,
        layer: Int[Array, ""],
        position: Int[Array, "P J"],
        layout: RolloutLayout | None = None,
    ) -> "GrowingCache":
        """Returns the cache with one position of each row replaced, as of `KVCache.written`."""
        parts = []
        for start, part in self.placed():
            size = part.keys.shape[-2]
            is_here = (position >= start) & (position < start + size)
            within = position if size == self.length else jnp.where(is_here, position - start, size)
            parts.append(part.written(new, layer, within, layout))
        return GrowingCache(tuple(parts))

    def cut(self) -> "GrowingCache":
        """Returns a cache of a single part in several: all but the last have one block.

        A CPU reads such a part where it is. One block of a longer part is copied first.
        """
        (whole,) = self.parts
        starts = [CACHE_BLOCK * i for i in range(num_parts(self.length))]
        ends = [*starts[1:], self.length]
        return GrowingCache(
            tuple(
                jax.tree.map(lambda x, i=i, j=j: x[..., i:j, :], whole)
                for i, j in zip(starts, ends, strict=True)
            )
        )


def num_parts(cache_length: int) -> int:
    """Returns the number of parts of a growing cache that is cut."""
    return min(-(-cache_length // CACHE_BLOCK), _MOST_PARTS)
