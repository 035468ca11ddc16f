"""Rotary positions, and the variants that stretch them to longer sequences."""

import abc
import dataclasses
import math
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


class RopeScaling(abc.ABC):
    """Change of the rotary frequencies, under the field names of Hugging Face's `rope_scaling`."""

    rope_type: ClassVar[str]

    @abc.abstractmethod
    def frequencies(self, head_dim: int, theta: float) -> Float[np.ndarray, " half"]:
        """Computes the frequencies, in radians per position."""

    @property
    @abc.abstractmethod
    def amplitude(self) -> float:
        """Factor of cosines and sines."""


def _plain(head_dim: int, theta: float) -> Float[np.ndarray, " half"]:
    return theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearScaling(RopeScaling):
    """Positions divided by a factor (arXiv 2306.15595)."""

    rope_type: ClassVar[str] = "linear"
    factor: float

    def frequencies(self, head_dim: int, theta: float) -> Float[np.ndarray, " half"]:
        return _plain(head_dim, theta) / self.factor

    @property
    def amplitude(self) -> float:
        return 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Scaling(RopeScaling):
    """Low frequencies divided by a factor, high ones kept, those between interpolated.

    Llama 3.1 (arXiv 2407.21783); the formula is that of its reference implementation.
    """

    rope_type: ClassVar[str] = "llama3"
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def frequencies(self, head_dim: int, theta: float) -> Float[np.ndarray, " half"]:
        plain = _plain(head_dim, theta)
        turns = self.original_max_position_embeddings * plain / (2 * math.pi)
        span = self.high_freq_factor - self.low_freq_factor
        kept = np.clip((turns - self.low_freq_factor) / span, 0, 1)
        return plain * (kept + (1 - kept) / self.factor)

    @property
    def amplitude(self) -> float:
        return 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnScaling(RopeScaling):
    """YaRN (arXiv 2309.00071): interpolated by the number of turns, with softer attention."""

    rope_type: ClassVar[str] = "yarn"
    factor: float
    original_max_position_embeddings: int
    attention_factor: float | None = None
    """`None`: `0.1 ln(factor) + 1` (section 3.4), or a quotient of two such terms by `mscale`."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    """Whether the ramp begins and ends at whole dimensions."""

    def frequencies(self, head_dim: int, theta: float) -> Float[np.ndarray, " half"]:
        low = self._dimension(self.beta_fast, head_dim, theta)
        high = self._dimension(self.beta_slow, head_dim, theta)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        width = high - low or 0.001
        interpolated = np.clip((np.arange(head_dim // 2) - low) / width, 0, 1)
        plain = _plain(head_dim, theta)
        return plain * (1 - interpolated) + plain / self.factor * interpolated

    def _dimension(self, turns: float, head_dim: int, theta: float) -> float:
        """Finds the dimension that turns this often over the original length."""
        length = self.original_max_position_embeddings / (turns * 2 * math.pi)
        return head_dim * math.log(length) / (2 * math.log(theta))

    @property
    def amplitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._softness(self.mscale) / self._softness(self.mscale_all_dim)
        return self._softness(1.0)

    def _softness(self, mscale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0


SCALINGS: dict[str, type[RopeScaling]] = {
    each.rope_type: each for each in (LinearScaling, Llama3Scaling, YarnScaling)
}
"""Supported variants, by `rope_type`."""


@dataclasses.dataclass(frozen=True)
class Rope:
    """Base of the rotary frequencies, and their scaling if any."""

    theta: float
    scaling: RopeScaling | None = None


class Rotary(NamedTuple):
    """Cosines and sines of rotary positions (RoFormer, arXiv 2104.09864), float32."""

    cos: Float[Array, "*shape D"]
    sin: Float[Array, "*shape D"]

    @classmethod
    def at(cls, positions: Int[Array, "*shape"], head_dim: int, rope: Rope) -> "Rotary":
        """Computes those of positions."""
        if rope.scaling is None:
            half = jnp.arange(0, head_dim, 2, dtype=jnp.float32)
            frequencies, amplitude = rope.theta ** (-half / head_dim), 1.0
        else:
            scaled = rope.scaling.frequencies(head_dim, rope.theta)
            frequencies, amplitude = jnp.asarray(scaled, jnp.float32), rope.scaling.amplitude
        angles = positions[..., None].astype(jnp.float32) * frequencies
        waves = jnp.cos(angles) * amplitude, jnp.sin(angles) * amplitude
        whole = (jnp.concatenate([wave, wave], axis=-1) for wave in waves)
        # Without the barrier, XLA's CPU compiler computes them anew for each head of each layer.
        # Where layers are in a loop, as on TPUs and GPUs, they are computed before it anyway.
        return cls(*jax.lax.optimization_barrier(tuple(whole)))

    def rotate(self, x: Float[Array, "*shape heads D"]) -> Float[Array, "*shape heads D"]:
        """Rotates heads, each dimension together with the one half a head away."""
        first, second = jnp.split(x, 2, axis=-1)
        turned = jnp.concatenate([-second, first], axis=-1)
        cos, sin = self.cos[..., None, :], self.sin[..., None, :]
        return (x * cos + turned * sin).astype(x.dtype)
