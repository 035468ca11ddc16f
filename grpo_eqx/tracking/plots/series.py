"""Courses of a metric over the steps, prepared for plots."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

_MOST_POINTS = 400
"""Most points of a line: about as many as a plot has columns of pixels."""


@dataclasses.dataclass(frozen=True)
class Course:
    """A metric of one run over its steps; NaN for steps without it."""

    steps: Float[np.ndarray, " N"]
    values: Float[np.ndarray, " N"]

    @property
    def is_empty(self) -> bool:
        return not np.isfinite(self.values).any()

    def at(self, steps: Float[np.ndarray, " M"]) -> Float[np.ndarray, " M"]:
        """Returns the values of some steps, of each the last recorded; NaN for unknown steps."""
        found = dict(zip(self.steps.tolist(), self.values.tolist(), strict=True))
        return np.array([found.get(step, np.nan) for step in steps.tolist()])

    def one_per_step(self) -> "Course":
        """Returns the course in the order of its steps, with the last recorded value of each."""
        steps, from_end = np.unique(self.steps[::-1], return_index=True)
        return Course(steps, self.values[::-1][from_end])

    def ends(self) -> tuple[float, float, int]:
        """Returns the means over the first and last few steps, and the number of these steps."""
        values = self.values[np.isfinite(self.values)]
        count = min(10, max(1, len(values) // 3))
        return float(values[:count].mean()), float(values[-count:].mean()), count

    def smooth(self) -> "Course":
        """Returns the running means."""
        return Course(self.steps, running_mean(self.values, window(len(self.values))))

    def thinned(self) -> "Course":
        """Returns a course of few points that looks the same: extremes of stretches of steps."""
        count = len(self.values)
        if count <= _MOST_POINTS:
            return self
        chosen = set[int]()
        # The lowest and the highest value of each stretch keep all visible peaks.
        for stretch in np.array_split(np.arange(count), _MOST_POINTS // 2):
            finite = stretch[np.isfinite(self.values[stretch])]
            if len(finite):
                values = self.values[finite]
                chosen |= {int(finite[values.argmin()]), int(finite[values.argmax()])}
        places = sorted(chosen)
        return Course(self.steps[places], self.values[places])


@dataclasses.dataclass(frozen=True)
class Band:
    """A metric of several runs: mean and extremes, at each step over the runs that have it."""

    mean: Course
    low: Course
    high: Course

    @classmethod
    def of(cls, courses: Sequence[Course]) -> "Band":
        """Returns the mean, the lowest and the highest of several runs' running means."""
        band = cls.of_points([course.one_per_step().smooth() for course in courses])
        count = len(band.mean.steps)
        places = np.linspace(0, count - 1, min(count, _MOST_POINTS)).round().astype(int)
        courses = band.mean, band.low, band.high
        return cls(*(Course(each.steps[places], each.values[places]) for each in courses))

    @classmethod
    def of_points(cls, courses: Sequence[Course]) -> "Band":
        """Returns the mean, the lowest and the highest of several runs' values, at any run's steps.

        At a step where a run has no value, the run does not count.
        """
        steps = np.unique(np.concatenate([course.steps for course in courses]))
        rows = np.stack([course.at(steps) for course in courses])
        found = np.isfinite(rows)
        steps, rows, found = (x[..., found.any(axis=0)] for x in (steps, rows, found))
        mean = np.where(found, rows, 0.0).sum(axis=0) / found.sum(axis=0)
        low = np.where(found, rows, np.inf).min(axis=0)
        high = np.where(found, rows, -np.inf).max(axis=0)
        return cls(*(Course(steps, each) for each in (mean, low, high)))


def window(count: int) -> int:
    """Returns the steps that a running mean averages, in a run of `count` steps."""
    return max(1, min(10, count // 5))


def running_mean(values: Float[np.ndarray, " N"], width: int) -> Float[np.ndarray, " N"]:
    """Averages each value with up to `width - 1` values before it; NaN does not count."""
    finite = np.isfinite(values)
    sums = np.cumsum(np.insert(np.where(finite, values, 0.0), 0, 0.0))
    counts = np.cumsum(np.insert(finite.astype(float), 0, 0.0))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - width, 0)
    count = counts[ends] - counts[starts]
    mean: Float[np.ndarray, " N"] = np.divide(
        sums[ends] - sums[starts], count, out=np.full(len(values), np.nan), where=count > 0
    )
    return mean
