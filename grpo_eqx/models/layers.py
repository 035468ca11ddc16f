"""The pieces of a Qwen2 layer: linear maps, RMSNorm, rotary positions, attention over segments.

Sequences come as `[P, G, T, ...]`: `P` prompts with `G` continuations each (a plain batch has
`G = 1`). Attention reads a list of *segments* of keys and values and merges them exactly, so that
a group's prompt is held and read once, not once per continuation.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

_MASKED = -1e30  # finite, so that a row without any visible key stays finite too

CACHE_BLOCK = 128
"""Positions of a growing cache that attention reads at a time."""


class Linear(eqx.Module):
    """`x @ weight.T + bias`, with the weight laid out as Hugging Face stores it."""

    weight: Float[Array, "*stack out in"]
    bias: Float[Array, "*stack out"] | None = None

    def __call__(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"]:
        # By this name rematerialisation finds the product, which `custom_vjp` hides from it.
        y = checkpoint_name(_project(x, self.weight), "product")
        return y if self.bias is None else y + self.bias


@jax.custom_vjp
def _project(
    x: Float[Array, "*batch in"], weight: Float[Array, "out in"]
) -> Float[Array, "*batch out"]:
    return jnp.einsum("...i,oi->...o", x, weight)


def _project_forward(
    x: Float[Array, "*batch in"], weight: Float[Array, "out in"]
) -> tuple[Float[Array, "*batch out"], tuple[Array, Array]]:
    return _project(x, weight), (x, weight)


def _project_backward(
    residuals: tuple[Array, Array], dy: Float[Array, "*batch out"]
) -> tuple[Float[Array, "*batch in"], Float[Array, "out in"]]:
    """The usual gradients; the weight's as the product whose transposed operand is the narrower.

    XLA's CPU compiler transposes the left operand by a strided copy, into which it fuses whatever
    computes the operand: for a wide activation that copy took a third of an update's time.
    """
    x, weight = residuals
    flat_x, flat_dy = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
    if flat_dy.shape[1] > flat_x.shape[1]:
        weight_gradient = jnp.einsum("ti,to->io", flat_x, flat_dy).T
    else:
        weight_gradient = jnp.einsum("to,ti->oi", flat_dy, flat_x)
    return jnp.einsum("...o,oi->...i", dy, weight), weight_gradient


_project.defvjp(_project_forward, _project_backward)


def rms_norm(
    x: Float[Array, "*batch H"], scale: Float[Array, " H"], eps: float
) -> Float[Array, "*batch H"]:
    """Root-mean-square normalisation (arXiv 1910.07467) with float32 statistics."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return scale * normed.astype(x.dtype)


class Rotary(NamedTuple):
    """Cosines and sines of rotary positions (RoFormer, arXiv 2104.09864), float32."""

    cos: Float[Array, "P G T D"]
    sin: Float[Array, "P G T D"]

    @classmethod
    def at(cls, positions: Int[Array, "P G T"], head_dim: int, theta: float) -> "Rotary":
        frequencies = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
        angles = positions[..., None].astype(jnp.float32) * frequencies
        angles = jnp.concatenate([angles, angles], axis=-1)
        return cls(jnp.cos(angles), jnp.sin(angles))

    def rotate(self, x: Float[Array, "P G T heads D"]) -> Float[Array, "P G T heads D"]:
        first, second = jnp.split(x, 2, axis=-1)
        turned = jnp.concatenate([-second, first], axis=-1)
        cos, sin = self.cos[..., None, :], self.sin[..., None, :]
        return (x * cos + turned * sin).astype(x.dtype)


class KeyValues(NamedTuple):
    """Keys and values of `J` rows per prompt: `J = 1` where the group shares them, else `J = G`."""

    keys: Float[Array, "*layers P J K S D"]
    values: Float[Array, "*layers P J K S D"]


class Segment(NamedTuple):
    """A stretch of keys and values, and which of them each query may see (broadcastable)."""

    kv: KeyValues
    visible: Bool[Array, "#P #J #T S"]


class Past(NamedTuple):
    """A layer's part of a cache that grows: each query sees the keys before its own place."""

    kv: KeyValues
    """Of all layers, in whole blocks of `CACHE_BLOCK`, or one shorter block."""
    layer: Int[Array, ""]
    place: Int[Array, "P G"]
    num_written: Int[Array, ""]
    """No place is larger, and blocks from here on are not read."""

    def block(self, number: Int[Array, ""]) -> Segment:
        """The segment of one block."""
        size = min(CACHE_BLOCK, self.kv.keys.shape[-2])
        first = number * size

        def cut(x: Float[Array, "L P G K S D"]) -> Float[Array, "P G K B D"]:
            _, P, G, K, _, D = x.shape
            start = (self.layer, 0, 0, 0, first, 0)
            return jax.lax.dynamic_slice(x, start, (1, P, G, K, size, D))[0]

        visible = first + jnp.arange(size) < self.place[..., None, None]
        return Segment(KeyValues(*(cut(x) for x in self.kv)), visible)

    def num_blocks(self) -> Int[Array, ""]:
        """How many blocks hold anything."""
        size = min(CACHE_BLOCK, self.kv.keys.shape[-2])
        return (self.num_written + size - 1) // size


class _Partial(NamedTuple):
    """Attention over one segment before normalisation, all float32."""

    weighted: Float[Array, "P G T N D"]
    total: Float[Array, "P G T N"]
    highest: Float[Array, "P G T N"]

    def merged(self, other: "_Partial") -> "_Partial":
        """Attention over both segments (as in FlashAttention, arXiv 2205.14135)."""
        highest = jnp.maximum(self.highest, other.highest)
        scale, other_scale = jnp.exp(self.highest - highest), jnp.exp(other.highest - highest)
        weighted = self.weighted * scale[..., None] + other.weighted * other_scale[..., None]
        return _Partial(weighted, self.total * scale + other.total * other_scale, highest)


def attend(
    queries: Float[Array, "P G T N D"], segments: Sequence[Segment], past: Past | None = None
) -> Float[Array, "P G T N D"]:
    """Softmax attention of each query over the union of all segments and of the past's blocks.

    Each segment is reduced by itself and the parts are merged by their softmax statistics, which
    equals one softmax over the concatenation. Every query must see at least one key of some
    segment; the result of one that sees none is finite and without meaning. A block that a query
    sees nothing of leaves its result the same to the last bit.
    """
    part = functools.reduce(
        _Partial.merged, [_attend_segment(queries, segment) for segment in segments]
    )
    if past is not None:

        def add(number: Int[Array, ""], part: _Partial) -> _Partial:
            return part.merged(_attend_segment(queries, past.block(number)))

        part = jax.lax.fori_loop(0, past.num_blocks(), add, part)
    return (part.weighted / part.total[..., None]).astype(queries.dtype)


def _attend_segment(queries: Float[Array, "P G T N D"], segment: Segment) -> _Partial:
    keys, values = segment.kv
    P, G, T, N, D = queries.shape
    _, J, K, _, _ = keys.shape
    rows, repeats = G // J, N // K
    # A shared segment sees its group as one long run of queries: one larger product per prompt.
    q = queries.reshape(P, J, rows, T, K, repeats, D)
    scores = jnp.einsum("pjgtkrd,pjksd->pjkrgts", q, keys, preferred_element_type=jnp.float32)
    visible = segment.visible[:, :, None, None, None]
    scores = jnp.where(visible, scores * D**-0.5, _MASKED)
    highest = jax.lax.stop_gradient(scores.max(axis=-1))
    weights = jnp.exp(scores - highest[..., None])
    weighted = jnp.einsum(
        "pjkrgts,pjksd->pjgtkrd",
        weights.astype(values.dtype),
        values,
        preferred_element_type=jnp.float32,
    )

    def by_query(x: Float[Array, "P J K R rows T"]) -> Float[Array, "P G T N"]:
        return x.transpose(0, 1, 4, 5, 2, 3).reshape(P, G, T, N)

    return _Partial(
        weighted.reshape(P, G, T, N, D), by_query(weights.sum(axis=-1)), by_query(highest)
    )
