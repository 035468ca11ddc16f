"""The metrics of a step, under TRL's names."""

import time
from collections.abc import Mapping

import numpy as np
from jaxtyping import Bool, Int

from grpo_eqx.rewards import Rewards


class StepClock:
    """Where a step's time goes: each lap is the time since the one before."""

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self._laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self._laps[f"time/train/{name}_s"] = now - self._last
        self._last = now

    def metrics(self) -> dict[str, float]:
        """The laps, and their sum as `step_time`."""
        return {"step_time": self._last - self._start, **self._laps}


def completion_metrics(
    lengths: Int[np.ndarray, "P G"], finished: Bool[np.ndarray, "P G"]
) -> dict[str, float]:
    """Lengths of all completions and of those that ended by themselves, and the share cut off."""
    metrics = {f"completions/{name}_length": v for name, v in _mean_min_max(lengths).items()}
    ended = lengths[finished] if finished.any() else np.zeros(1)
    metrics |= {
        f"completions/{name}_terminated_length": v for name, v in _mean_min_max(ended).items()
    }
    metrics["completions/clipped_ratio"] = float(1 - finished.mean())
    return metrics


def step_metrics(
    rewards: Rewards,
    lengths: Int[np.ndarray, "P G"],
    finished: Bool[np.ndarray, "P G"],
    update: Mapping[str, float],
    clock: StepClock,
) -> dict[str, float]:
    """All metrics of one step."""
    return {
        **rewards.metrics(),
        **completion_metrics(lengths, finished),
        **{name: float(value) for name, value in update.items()},
        **clock.metrics(),
    }


def _mean_min_max(values: np.ndarray) -> dict[str, float]:
    return {"mean": float(values.mean()), "min": float(values.min()), "max": float(values.max())}
