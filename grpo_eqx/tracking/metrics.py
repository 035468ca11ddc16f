"""Metrics of a step, under TRL's names."""

import time
import warnings
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from statistics import fmean
from typing import SupportsFloat

import numpy as np
from jaxtyping import Bool, Int

from grpo_eqx.data.acted import Acted
from grpo_eqx.objective.advantages import all_equal
from grpo_eqx.rewards import Rewards

OF_THE_MACHINE = "time/", "throughput/", "memory/", "perf/", "compile/", "step_time"
"""Beginnings of names of metrics that tell what a step cost, not what it learned."""
_STEPS_OF_AVERAGE = 10


class StepClock:
    """Clock that divides a step's time into named laps, each the time since the previous lap.

    Laps of the same name add up. A step begins where the previous step ended, so that no time is
    lost.
    """

    def __init__(self, on_lap: Callable[[str], None] = lambda name: None) -> None:
        """**Arguments:**

        - `on_lap`: called with the name of each lap when it ends.
        """
        self._on_lap = on_lap
        self._start = self._last = time.perf_counter()
        self._laps: dict[str, float] = {}
        self._earlier: deque[float] = deque(maxlen=_STEPS_OF_AVERAGE - 1)

    def next_step(self) -> None:
        self._earlier.append(self._last - self._start)
        self._start, self._laps = self._last, {}

    def skip(self, seconds: float) -> None:
        """Leaves some of the seconds since the last lap out of all steps."""
        self._start, self._last = self._start + seconds, self._last + seconds

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self._on_lap(name)
        name = f"time/train/{name}_s"
        self._laps[name] = self._laps.get(name, 0.0) + now - self._last
        self._last = now

    def metrics(self) -> dict[str, float]:
        """Returns the laps, their sum, and the mean of this sum over the last ten steps."""
        seconds = self._last - self._start
        return {
            "step_time": seconds,
            "time/train/step_s": seconds,
            "time/train/step_avg_last10_s": fmean([*self._earlier, seconds]),
            **self._laps,
        }


def reward_metrics(rewards: Rewards) -> dict[str, float]:
    """Returns means and standard deviations under TRL's names."""
    total = rewards.total
    # A group without two rewards, as where completions are lost, tells nothing of their equality.
    several = (~np.isnan(total)).sum(axis=1) > 1
    zero_std = all_equal(total, axis=1)[several, 0]
    with warnings.catch_warnings():
        # NaN is the right mean of rewards that are all missing, and of no groups.
        warnings.simplefilter("ignore", RuntimeWarning)
        metrics = {
            "reward": float(np.nanmean(total)),
            "reward_std": float(np.nanstd(total, ddof=1)),
            "frac_reward_zero_std": float(zero_std.mean()),
        }
        for name, own in zip(rewards.names, rewards.each, strict=True):
            metrics[f"rewards/{name}/mean"] = float(np.nanmean(own))
            metrics[f"rewards/{name}/std"] = float(np.nanstd(own, ddof=1))
    return metrics


def failure_metrics(rewards: Rewards) -> dict[str, float]:
    """Counts the completions on which each function failed, if failures do not stop the run."""
    if rewards.failed is None:
        return {}
    pairs = zip(rewards.names, rewards.failed, strict=True)
    return {f"rewards/{name}/num_failed": float(failed.sum()) for name, failed in pairs}


def tool_metrics(acted: Acted | None) -> dict[str, float]:
    """Returns how often completions call tools, and how often calls fail, under TRL's names.

    For agents, how often they ask, and how often they rewrite the history.
    """
    if acted is None:
        return {}
    counts, number = acted.counts, max(len(acted.each), 1)
    if counts.requests:
        return {
            "agents/requests": counts.requests / number,
            "agents/forks": counts.forks / number,
            "agents/drifted_tokens": counts.drifted_tokens / number,
            "agents/num_refused": counts.refused,
            "tools/num_lost": counts.lost,
            "time/agents/run_s": counts.seconds / number,
        }
    if not counts.completions:
        return {}
    return {
        "tools/call_frequency": counts.calls / counts.completions,
        "tools/failure_frequency": counts.failures / max(counts.calls, 1),
        "tools/turns": counts.turns / counts.completions,
        "tools/num_lost": counts.lost,
        "time/tools/call_s": counts.seconds / max(counts.calls, 1),
        "time/tools/wait_s": acted.waited,
    }


def completion_metrics(
    lengths: Int[np.ndarray, "P G"], finished: Bool[np.ndarray, "P G"]
) -> dict[str, float]:
    """Summarizes the lengths of all and of finished completions, and the share cut off."""
    metrics = {f"completions/{name}_length": v for name, v in _mean_min_max(lengths).items()}
    ended = lengths[finished] if finished.any() else np.zeros(1)
    metrics |= {
        f"completions/{name}_terminated_length": v for name, v in _mean_min_max(ended).items()
    }
    metrics["completions/clipped_ratio"] = float(1 - finished.mean())
    return metrics


def id_metrics(
    ids: Sequence[Int[np.ndarray, " _"]], without_token: Collection[int]
) -> dict[str, float]:
    """Counts ids of completions for which the tokenizer has no token, where the model has such."""
    if not without_token:
        return {}
    drawn = np.concatenate([np.zeros(0, int), *ids])
    return {"completions/num_ids_without_token": float(np.isin(drawn, [*without_token]).sum())}


def merge_updates(updates: Sequence[Mapping[str, SupportsFloat]]) -> dict[str, float]:
    """Merges the metrics of a step's updates: minima and maxima if the name says so, else means."""
    merged = {}
    for name in updates[0]:
        values = [float(update[name]) for update in updates]
        kind = name.replace("/", "_").rsplit("_", 1)[-1]
        merged[name] = {"min": min, "max": max}.get(kind, fmean)(values)
    return merged


def _mean_min_max(values: np.ndarray) -> dict[str, float]:
    return {"mean": float(values.mean()), "min": float(values.min()), "max": float(values.max())}
