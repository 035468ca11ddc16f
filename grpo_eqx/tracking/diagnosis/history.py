"""The metrics of a run up to a step, as rules read them."""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from statistics import fmean, median, variance
from typing import Any, SupportsFloat

from grpo_eqx.common.choices import SOFT_OVERLONG
from grpo_eqx.tracking.run_folder import PASSED

EQUAL = 1e-6
"""Largest standard deviation over mean of rewards that count as equal up to rounding."""
Row = Mapping[str, SupportsFloat]
"""Metrics of a step or an evaluation by name, with the step's number as `step`."""
_OF_FUNCTION, _MEAN = "rewards/", "/mean"
_PEAK_WINDOW = 10
"""Steps in the windows whose best reward is remembered."""
_AT_START = 3
_NEAR_BEST = 0.1
"""Distance from the best reward, in standard deviations of single rewards at the start."""
_SOLVED = 0.5
"""Standard deviation of single rewards of solved problems, relative to the start. If half of the
answers were right at the start, this means that 93 % are right."""


class History:
    """Settings of a run and its metrics so far. Rules read the first and the last of them."""

    def __init__(self, settings: Mapping[str, Any], num_devices: int | None = None):
        """**Arguments:**

        - `settings`: the fields of the run's resolved config, and descriptions of what was passed
          besides; any may be missing.
        - `num_devices`: devices of the run, over all hosts; `None` if unknown.
        """
        self.settings = settings
        self.num_devices = num_devices
        self.steps: list[Row] = []
        self.evaluations: list[Row] = []
        self.best_reward = -math.inf
        """Highest median of the mean rewards of ten consecutive steps."""
        self.best_reward_step = 0
        """Last of these ten steps."""
        self.best_reward_std = 0.0
        """Standard deviation of single rewards over these ten steps."""

    def append(self, metrics: Row) -> None:
        """Adds a step, with its number as `step`."""
        self.steps.append(metrics)
        rewards = self.last("reward", _PEAK_WINDOW)
        if len(rewards) == _PEAK_WINDOW and (middle := median(rewards)) > self.best_reward:
            self.best_reward, self.best_reward_step = middle, self.step
            # A step has few groups, which may happen to be alike, so steps' means count, too.
            within = fmean(x * x for x in self.last("reward_std", _PEAK_WINDOW) or [0.0])
            self.best_reward_std = math.sqrt(within + variance(rewards))

    @property
    def step(self) -> int:
        """Number of the newest step or evaluation."""
        newest = [rows[-1] for rows in (self.steps, self.evaluations) if rows]
        return max((int(float(row["step"])) for row in newest), default=0)

    def newest(self, name: str) -> float:
        """Returns a metric of the newest step, NaN if it has none."""
        return float(self.steps[-1].get(name, math.nan))

    def last(self, name: str, count: int) -> list[float]:
        """Returns the finite values of a metric in the last `count` steps, oldest first."""
        return finite(name, self.steps[-count:])

    def first(self, name: str, count: int) -> list[float]:
        """Returns the finite values of a metric in the first `count` steps."""
        return finite(name, self.steps[:count])

    def recorded(self, name: str, count: int) -> list[float]:
        """Returns the values of a metric in the last `count` steps that have it, NaN included."""
        return [float(row[name]) for row in self.steps[-count:] if name in row]

    def window(self, count: int) -> int:
        """Returns `count`, or the planned number of steps if it is smaller."""
        return max(1, min(count, int(self.setting("steps", count))))

    def window_of(self, samples: int, per_step: int, least: int) -> int:
        """Returns the number of steps with `samples` samples: at least `least`, at most all."""
        return self.window(max(least, math.ceil(samples / max(per_step, 1))))

    def setting(self, name: str, default: Any) -> Any:
        """Returns a setting, or a default if it is missing or `None`."""
        value = self.settings.get(name)
        return default if value is None else value

    @property
    def prompts(self) -> int:
        """Prompts of a step."""
        return int(self.setting("prompts_per_step", 16))

    @property
    def completions(self) -> int:
        """Completions of a step."""
        return self.prompts * int(self.setting("num_generations", 8))

    @property
    def updates_per_step(self) -> int:
        """Updates on each rollout."""
        names = "num_iterations", "steps_per_generation"
        return math.prod(int(self.setting(name, 1)) for name in names)

    @cached_property
    def reward_funcs(self) -> Sequence[str]:
        """Names of the reward functions, those of environments included.

        Without the length penalty, which may rightly be 0.
        """
        names = [
            name.removeprefix(_OF_FUNCTION).removesuffix(_MEAN)
            for name in self.steps[0]
            if name.startswith(_OF_FUNCTION) and name.endswith(_MEAN)
        ]
        return [name for name in names if name != SOFT_OVERLONG]

    @cached_property
    def environments(self) -> Sequence[str]:
        """Names of the environments' classes, under which their own rewards are logged."""
        passed = str(self.setting("environment_factory", ""))
        return passed.removesuffix(PASSED).split(", ") if passed else []

    @property
    def has_tools(self) -> bool:
        """Whether completions call tools, or act in environments."""
        return math.isfinite(self.newest("tools/call_frequency"))

    def is_solved(self, count: int) -> bool:
        """Returns whether nothing is left to gain in the last `count` steps.

        The mean reward is near its best and higher than at the start, and most single rewards are
        near the mean. (The largest possible reward is unknown.)
        """
        early, now = self.first("reward", _AT_START), self.last("reward", count)
        early_stds = self.first("reward_std", _AT_START)
        stds = self.last("reward_std", count)
        if not (early and now and early_stds and stds):
            return False
        mean, deviation = fmean(now), fmean(early_stds)
        near_best = mean >= self.best_reward - _NEAR_BEST * deviation
        return near_best and mean > fmean(early) and fmean(stds) <= _SOLVED * deviation

    def span(self, count: int) -> str:
        """Names the last `count` steps."""
        rows = self.steps[-count:]
        first, last = (int(float(row["step"])) for row in (rows[0], rows[-1]))
        return f"step {last}" if first == last else f"steps {first} to {last}"


def finite(name: str, rows: Sequence[Row]) -> list[float]:
    """Returns the finite values of a metric in rows."""
    return [x for row in rows if math.isfinite(x := float(row.get(name, math.nan)))]
