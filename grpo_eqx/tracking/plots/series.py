"""Courses of a metric over the steps, made ready to be drawn."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

_MOST_POINTS = 400
"""Points of a line, about as many as there are pixels to draw it in."""


@dataclasses.dataclass(frozen=True)
class Course:
    """A metric of one run over its steps; NaN where a step has none."""

    steps: Float[np.ndarray, " N"]
    values: Float[np.ndarray, " N"]

    @property
    def is_empty(self) -> bool:
        return not np.isfinite(self.values).any()

    def at(self, steps: Float[np.ndarray, " M"]) -> Float[np.ndarray, " M"]:
        """Returns the values after some of the steps: of each, the last that was recorded."""
        found = dict(zip(self.steps.tolist(), self.values.tolist(), strict=True))
        return np.array([found.get(step, np.nan) for step in steps.tolist()])

    def smooth(self) -> "Course":
        """Returns the running means."""
        return Course(self.steps, running_mean(self.values, window(len(self.values))))

    def thinned(self) -> "Course":
        """Returns a course of few points that looks the same: extremes of stretches of steps."""
        count = len(self.values)
        if count <= _MOST_POINTS:
            return self
        chosen = set[int]()
        for stretch in np.array_split(np.arange(count), _MOST_POINTS // 2):
            finite = stretch[np.isfinite(self.values[stretch])]
            if len(finite):
                values = self.values[finite]
                chosen |= {int(finite[values.argmin()]), int(finite[values.argmax()])}
        places = sorted(chosen)
        return Course(self.steps[places], self.values[places])


@dataclasses.dataclass(frozen=True)
class Band:
    """A metric of several runs over the steps that all of them have made."""

    mean: Course
    low: Course
    high: Course

    @classmethod
    def of(cls, courses: Sequence[Course]) -> "Band":
        """Returns mean, lowest and highest of the running means of several runs."""
        common = courses[0].steps
        for course in courses[1:]:
            common = np.intersect1d(common, course.steps)
        rows = np.stack(
            [course.smooth().values[np.isin(course.steps, common)] for course in courses]
        )
        # NaN in one of the runs is NaN here: a mean of fewer runs would be another quantity.
        mean, low, high = rows.mean(axis=0), rows.min(axis=0), rows.max(axis=0)
        places = np.linspace(0, len(common) - 1, min(len(common), _MOST_POINTS)).round().astype(int)
        return cls(*(Course(common[places], each[places]) for each in (mean, low, high)))


def window(count: int) -> int:
    """Returns how many steps, of so many, a running mean averages."""
    return max(1, min(10, count // 5))


def running_mean(values: Float[np.ndarray, " N"], width: int) -> Float[np.ndarray, " N"]:
    """Averages each value with up to `width - 1` before it; NaN is left out of a mean."""
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
