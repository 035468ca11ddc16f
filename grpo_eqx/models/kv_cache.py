"""Keys and values of past positions, as attention computes them and as they are stored."""

import abc
import itertools
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int8, Num

from grpo_eqx.models.product import product
from grpo_eqx.models.rounding import rounded_rows
from grpo_eqx.models.tiles import filled
from grpo_eqx.sharding.rollout_layout import RolloutLayout

CACHE_BLOCK = 128
"""Number of positions of a growing cache that attention reads at a time."""
BLOCKS_OF_ROW = 16
"""Limit on the blocks that it reads at a time of a single row: a few megabytes."""


class KeyValues(NamedTuple):
    """Keys and values, of `J` rows per prompt: `J = 1` where the group shares them, else `J = G`.

    Attention over whole rows has no axis `J`.
    """

    keys: Float[Array, "*rows K S D"]
    values: Float[Array, "*rows K S D"]

    def filled(self, multiple: int) -> "KeyValues":
        """Returns them with zeros after each head, up to a multiple of `multiple` elements."""
        return KeyValues(*(filled(x, -1, multiple) for x in self))


def positions_read(num_written: Int[Array, "*n"], cache_length: int) -> Int[Array, "*n"]:
    """Returns how many of a growing cache's positions attention reads: whole blocks."""
    if cache_length <= CACHE_BLOCK:
        return jnp.full_like(num_written, cache_length)
    return (num_written + CACHE_BLOCK - 1) // CACHE_BLOCK * CACHE_BLOCK


def blocks_of_row(num_positions: int) -> int:
    """Returns how many blocks of a row to read at a time, so that reads divide the positions."""
    number = num_positions // CACHE_BLOCK
    return max(n for n in range(1, BLOCKS_OF_ROW + 1) if number % n == 0)


class KVCache(eqx.Module):
    """Stored keys and values of some layers: in a float dtype, or as int8 with scales.

    Heads may be stored with zeros after them (`KeyValues.filled`).
    """

    keys: eqx.AbstractVar[Num[Array, "*layers P J K _ _"]]
    values: eqx.AbstractVar[Num[Array, "*layers P J K S D"]]
    key_scales: eqx.AbstractVar[Float[Array, "*layers P J K _ _"] | None]
    """Scale of each int8 key, in the form of `keys`."""
    value_scales: eqx.AbstractVar[Float[Array, "*layers P J K S 1"] | None]

    @property
    @abc.abstractmethod
    def key_axis(self) -> int:
        """Axis of positions in `keys`, counted from the end."""

    @abc.abstractmethod
    def scores(self, queries: Float[Array, "P J K r D"]) -> Float[Array, "P J K r S"]:
        """Computes the products of queries with the keys of one layer, in float32."""

    @abc.abstractmethod
    def growing(self, rows: int, slots: int, length: int) -> "GrowingCache":
        """Returns an empty cache of these layers, for `length` positions in slots of rows."""

    @property
    def blocks_of_row(self) -> int:
        """Number of blocks that attention reads at a time of a single row."""
        return blocks_of_row(self.num_positions)

    @property
    def num_positions(self) -> int:
        return self.values.shape[-2]

    @property
    def head_size(self) -> int:
        """Number of elements of a head, with the zeros after it."""
        return self.values.shape[-1]

    def mapped(self, func: Callable[..., Array], *others: "KVCache") -> "KVCache":
        """Maps `func` over the arrays of this and other caches.

        `func` gets as its keyword `axis` this cache's axis of positions, counted from the end.
        Other caches may have theirs elsewhere.
        """
        caches = self, *others
        of_keys, of_values = partial(func, axis=self.key_axis), partial(func, axis=-2)
        keys, key_scales = jax.tree.map(of_keys, *((x.keys, x.key_scales) for x in caches))
        values, value_scales = jax.tree.map(
            of_values, *((x.values, x.value_scales) for x in caches)
        )
        return type(self)(keys, values, key_scales, value_scales)

    def empty(self, rows: int, slots: int, length: int) -> "KVCache":
        """Returns a cache of zeros in this form, for `length` positions in slots of rows."""

        def zeros(x: Array, axis: int) -> Array:
            shape = [x.shape[0], rows, slots, *x.shape[3:]]
            shape[axis] = length
            return jnp.zeros(shape, x.dtype)

        return self.mapped(zeros)

    def written(
        self,
        new: KeyValues,
        layer: Int[Array, ""],
        positions: Int[Array, "P J T"],
        layout: RolloutLayout | None = None,
    ) -> "KVCache":
        """Returns the cache of all layers with some positions of each row replaced, in one layer.

        **Arguments:**

        - `new`: keys and values, `[P, J, K, T, D]`. Zeros follow each head, as in the cache.
        - `layer`: the layer.
        - `positions`: where they are written. A position past the end writes nothing.
        - `layout`: the layout over devices.
        """

        def write(cache: Array, tokens: Array, axis: int) -> Array:
            func: Callable[..., Array] = partial(_written, axis=axis)
            if layout is not None:
                row = layout.prompts, layout.groups
                of_tokens = *row, layout.heads(tokens.shape[2])
                of_cache = (), *of_tokens
                func = layout.on_each_device(func, [of_cache, of_tokens, (), row], of_cache)
            return func(cache, tokens, layer, positions)

        return self.mapped(write, StoredKV.of(new.filled(self.head_size), self.values.dtype))

    def loaded(self, dtype: jnp.dtype) -> "KVCache":
        """Returns the cache in `dtype`, in which attention computes, without scales."""
        keys, values = self.keys, self.values
        if self.key_scales is not None and self.value_scales is not None:
            keys, values = keys * self.key_scales, values * self.value_scales
        return type(self)(keys.astype(dtype), values.astype(dtype), None, None)


class StoredKV(KVCache):
    """Keys and values as `[*layers, P, J, K, S, D]`."""

    keys: Float[Array, "*layers P J K S D"] | Int8[Array, "*layers P J K S D"]
    values: Float[Array, "*layers P J K S D"] | Int8[Array, "*layers P J K S D"]
    key_scales: Float[Array, "*layers P J K S 1"] | None = None
    value_scales: Float[Array, "*layers P J K S 1"] | None = None

    @classmethod
    def of(cls, kv: KeyValues, dtype: jnp.dtype) -> "StoredKV":
        """Rounds to `dtype`; for int8, the largest magnitude per head and position becomes 127."""
        if dtype != jnp.int8:
            return cls(kv.keys.astype(dtype), kv.values.astype(dtype))
        (keys, key_scales), (values, value_scales) = (rounded_rows(x) for x in kv)
        return cls(keys, values, key_scales[..., None], value_scales[..., None])

    @property
    def key_axis(self) -> int:
        return -2

    def scores(self, queries: Float[Array, "P J K r D"]) -> Float[Array, "P J K r S"]:
        return product("pjkrd,pjksd->pjkrs", queries, self.keys)

    def growing(self, rows: int, slots: int, length: int) -> "GrowingCache":
        return GrowingCache((self.empty(rows, slots, length),))


def _written(
    cache: Num[Array, "L P J K _ _"],
    tokens: Num[Array, "P J K T D"],
    layer: Int[Array, ""],
    positions: Int[Array, "P J T"],
    axis: int,
) -> Num[Array, "L P J K _ _"]:
    """Returns one array of a cache with tokens written, at their positions on `axis`."""
    P, J, K, _, _ = tokens.shape
    rows = jnp.arange(P)[:, None, None], jnp.arange(J)[:, None]
    where: list[Array | slice]
    if cache.dtype == jnp.int8:
        # Head by head: to write several at once, a TPU's compiler would lay int8 numbers out in
        # another way than attention reads them, and copy the cache for each token and layer.
        where = [*(x[..., None] for x in rows), jnp.arange(K), positions[..., None]]
    else:
        where = [*rows, slice(None), positions]
    if axis == -1:
        where.insert(-1, slice(None))
    return cache.at[layer, *where].set(tokens.swapaxes(2, 3), mode="drop")


class GrowingCache(NamedTuple):
    """Keys and values of completions so far, in parts: runs of successive positions.

    A part has whole blocks of `CACHE_BLOCK` positions; a shorter one is the only one.
    """

    parts: tuple[KVCache, ...]

    @property
    def length(self) -> int:
        """Number of positions."""
        return sum(part.num_positions for part in self.parts)

    def placed(self) -> list[tuple[int, KVCache]]:
        """Returns the parts, each with its first position."""
        sizes = (part.num_positions for part in self.parts)
        return list(zip(itertools.accumulate(sizes, initial=0), self.parts, strict=False))

    def written(
        self,
        new: KeyValues,
        layer: Int[Array, ""],
        positions: Int[Array, "P J T"],
        layout: RolloutLayout | None = None,
    ) -> "GrowingCache":
        """Returns the cache with some positions of each row replaced, as `KVCache.written` does."""
        parts = []
        for start, part in self.placed():
            size = part.num_positions
            is_here = (positions >= start) & (positions < start + size)
            within = (
                positions if size == self.length else jnp.where(is_here, positions - start, size)
            )
            parts.append(part.written(new, layer, within, layout))
        return GrowingCache(tuple(parts))
