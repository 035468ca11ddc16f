"""Confidence intervals of an evaluation's figures.

The held-out problems count as a random sample of all problems of their kind. So the width of an
interval depends on the number of problems rather than of completions.
"""

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

_Z = 1.959963984540054
"""Quantile of the normal distribution for two-sided intervals of 95 %."""


class Estimate(NamedTuple):
    """A figure with the ends of its 95 % interval."""

    value: float
    low: float
    high: float


def share_of(solved: Bool[np.ndarray, " N"]) -> Estimate:
    """Estimates a probability from the share of solved problems.

    The interval is Wilson's score interval (JASA 22, 1927). Unlike the normal interval, it holds
    for few problems and for shares near 0 and 1 (Brown, Cai and DasGupta, Statistical Science 16,
    2001).
    """
    return _wilson(float(solved.mean()), len(solved))


def mean_share_of(shares: Float[np.ndarray, " N"], samples: int) -> Estimate:
    """Estimates a probability as the mean over problems, each estimated by `samples` completions.

    The interval is Wilson's, as in `share_of`, for the number of independent completions that would
    give the mean `p` its variance between problems: `n = p (1 - p) / var(p)`, the effective sample
    size of surveys (Korn and Graubard, Survey Methodology 24, 1998). This number is at least the
    number of problems, which is used if all shares are equal, and at most the number of
    completions. Unlike the normal interval, the interval is not empty if no completion is correct,
    and never exceeds 0 to 1.
    """
    problems, p = len(shares), float(shares.mean())
    variance = float(shares.var(ddof=1)) / problems if problems > 1 else 0.0
    n = p * (1 - p) / variance if variance > 0 else problems
    return _wilson(p, min(max(n, problems), problems * samples))


def _wilson(share: float, n: float | int) -> Estimate:
    center = (share + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
    half = _Z / (1 + _Z**2 / n) * math.sqrt(share * (1 - share) / n + _Z**2 / (4 * n**2))
    low, high = max(0.0, center - half), min(1.0, center + half)
    # At the ends, they are exactly 0 and 1, which rounding misses.
    return Estimate(share, low if share > 0 else 0.0, high if share < 1 else 1.0)


def mean_of(values: Float[np.ndarray, " N"]) -> Estimate:
    """Estimates a mean from the problems' means over their completions.

    The interval is the normal interval over problems, by the central limit theorem: completions of
    a problem are not independent, so their mean counts as one value (Miller, "Adding Error Bars to
    Evals", arXiv 2411.00640). NaN values are left out. A single value has no interval.
    """
    values = values[~np.isnan(values)]
    if len(values) == 0:
        return Estimate(math.nan, math.nan, math.nan)
    mean = float(values.mean())
    if len(values) == 1:
        return Estimate(mean, math.nan, math.nan)
    half = _Z * float(values.std(ddof=1)) / math.sqrt(len(values))
    return Estimate(mean, mean - half, mean + half)
