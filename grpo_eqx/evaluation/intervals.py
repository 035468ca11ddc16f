"""Confidence intervals of an evaluation's figures.

The held-out problems are taken as a random sample of all problems of their kind, so that the number
of problems, and not of completions, decides how wide an interval is.
"""

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

_Z = 1.959963984540054
"""Quantile of the normal distribution that two-sided intervals of 95 % have."""


class Estimate(NamedTuple):
    """A figure, with the ends of its interval of 95 %."""

    value: float
    low: float
    high: float


def share_of(solved: Bool[np.ndarray, " N"]) -> Estimate:
    """Estimates a probability from the share of problems that are solved.

    The interval is Wilson's score interval (JASA 22, 1927), which unlike the normal one holds for
    few problems and for shares near 0 and 1 (Brown, Cai and DasGupta, Statistical Science 16,
    2001).
    """
    return _wilson(float(solved.mean()), len(solved))


def mean_share_of(shares: Float[np.ndarray, " N"], samples: int) -> Estimate:
    """Estimates a probability from each problem's own, as `samples` completions estimate it.

    The interval is Wilson's, as that of `share_of`, for as many independent completions as give the
    mean `p` the variance that it has between problems: `n = p (1 - p) / var(p)` (the effective
    sample size of surveys: Korn and Graubard, Survey Methodology 24, 1998). They are at least the
    problems and at most all completions, and the problems where no two of these differ. So it is
    not empty where no completion is right, and never leaves 0 to 1, as the normal one does.
    """
    problems, p = len(shares), float(shares.mean())
    variance = float(shares.var(ddof=1)) / problems if problems > 1 else 0.0
    n = p * (1 - p) / variance if variance > 0 else problems
    return _wilson(p, min(max(n, problems), problems * samples))


def _wilson(share: float, n: float | int) -> Estimate:
    center = (share + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
    half = _Z / (1 + _Z**2 / n) * math.sqrt(share * (1 - share) / n + _Z**2 / (4 * n**2))
    return Estimate(share, max(0.0, center - half), min(1.0, center + half))


def mean_of(values: Float[np.ndarray, " N"]) -> Estimate:
    """Estimates a mean from each problem's own, as the mean over its completions.

    The interval is the normal one over problems, by the central limit theorem: the completions of
    one problem are not independent, and their mean is one value (Miller, "Adding Error Bars to
    Evals", arXiv 2411.00640). NaN values are left out, and a single value has no interval.
    """
    values = values[~np.isnan(values)]
    if len(values) == 0:
        return Estimate(math.nan, math.nan, math.nan)
    mean = float(values.mean())
    if len(values) == 1:
        return Estimate(mean, math.nan, math.nan)
    half = _Z * float(values.std(ddof=1)) / math.sqrt(len(values))
    return Estimate(mean, mean - half, mean + half)
