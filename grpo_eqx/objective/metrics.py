"""Metrics of an update, recorded per micro-batch and merged exactly."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from grpo_eqx.objective.aggregation import Totals


class Metrics(NamedTuple):
    """Metrics of a micro-batch by name, grouped by how they merge across micro-batches."""

    sums: dict[str, Array]
    mins: dict[str, Array]
    maxs: dict[str, Array]

    @classmethod
    def of_nothing(cls, like: "Metrics") -> "Metrics":
        """Returns the metrics of no micro-batch, with the names and dtypes of others."""
        return cls(
            {name: jnp.zeros((), x.dtype) for name, x in like.sums.items()},
            {name: jnp.full((), jnp.inf, x.dtype) for name, x in like.mins.items()},
            {name: jnp.full((), -jnp.inf, x.dtype) for name, x in like.maxs.items()},
        )

    def merged(self, other: "Metrics") -> "Metrics":
        """Merges the metrics of two parts of a batch."""
        return Metrics(
            {name: x + other.sums[name] for name, x in self.sums.items()},
            {name: jnp.minimum(x, other.mins[name]) for name, x in self.mins.items()},
            {name: jnp.maximum(x, other.maxs[name]) for name, x in self.maxs.items()},
        )

    def values(self) -> dict[str, Float[Array, ""]]:
        """Returns the metrics by name, as one dictionary."""
        # A min or max over no tokens keeps its initial value, and becomes 0.
        return {
            **self.sums,
            **{name: jnp.where(x == jnp.inf, 0.0, x) for name, x in self.mins.items()},
            **{name: jnp.where(x == -jnp.inf, 0.0, x) for name, x in self.maxs.items()},
        }


class MetricsRecorder:
    """Recorder for a micro-batch's values: `[P, G, Tc]` per token, or `[P, G, 1]` per sequence."""

    def __init__(self, mask: Bool[Array, "P G Tc"], totals: Totals):
        self.mask = mask
        self.totals = totals
        self._metrics = Metrics({}, {}, {})

    def finish(self) -> Metrics:
        """Returns the recorded metrics, without gradient."""
        return jax.lax.stop_gradient(self._metrics)

    def add(self, name: str, part: Float[Array, ""] | Int[Array, ""]) -> None:
        """Records this micro-batch's part of a number that sums over micro-batches."""
        self._metrics.sums[name] = part.astype(jnp.float32)

    def mean(self, name: str, x: Array) -> None:
        """Records the mean over tokens, or over sequences that have any."""
        tokens = x.shape == self.mask.shape
        count = self.totals.tokens if tokens else self.totals.filled_sequences
        self.add(name, jnp.sum(x, where=self._present(x)) / jnp.maximum(count, 1))

    def mean_max(self, name: str, x: Float[Array, "P G W"]) -> None:
        self.mean(f"{name}/mean", x)
        self._metrics.maxs[f"{name}/max"] = x.max(where=self._present(x), initial=-jnp.inf)

    def mean_min_max(self, name: str, x: Float[Array, "P G W"]) -> None:
        self.mean_max(name, x)
        self._metrics.mins[f"{name}/min"] = x.min(where=self._present(x), initial=jnp.inf)

    def sequence_min(self, name: str, x: Bool[Array, "P G W"]) -> None:
        """Records the smallest of the per-sequence means."""
        means, present = self._sequence_means(x)
        self._metrics.mins[name] = means.min(where=present, initial=jnp.inf)

    def sequence_max(self, name: str, x: Bool[Array, "P G W"]) -> None:
        """Records the largest of the per-sequence means."""
        means, present = self._sequence_means(x)
        self._metrics.maxs[name] = means.max(where=present, initial=-jnp.inf)

    def _present(self, x: Array) -> Bool[Array, "P G W"]:
        return self.mask if x.shape == self.mask.shape else self.mask.any(axis=-1, keepdims=True)

    def _sequence_means(self, x: Array) -> tuple[Float[Array, "P G"], Bool[Array, "P G"]]:
        present = self._present(x)
        counts = present.sum(axis=-1)
        return jnp.sum(x, axis=-1, where=present) / jnp.maximum(counts, 1), counts > 0
