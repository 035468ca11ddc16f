"""Course of a metric in one line of text, and its direction."""

import math
import statistics
from collections.abc import Sequence

import numpy as np

_BLOCKS, _ASCII_BLOCKS = "▁▂▃▄▅▆▇█", "_.-=+*%@"
_RECENT = 20
"""Latest values of which a direction is told."""
_LEAST = 6
_ERRORS = 2.0
"""Standard errors by which the means of the older and the newer half of them differ, where the
difference is no chance: without a trend, one time in twenty."""


def sparkline(values: Sequence[float], width: int, *, ascii_only: bool = False) -> str:
    """Draws all values in at most `width` characters, each the mean of as many of them.

    The lowest mean has the lowest block and the highest the highest; where nothing is finite, there
    is a space.
    """
    size = max(1, -(-len(values) // max(1, width)))
    parts = [values[start : start + size] for start in range(0, len(values), size)]
    means = [_mean(part) for part in parts]
    finite = [x for x in means if math.isfinite(x)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    blocks = _ASCII_BLOCKS if ascii_only else _BLOCKS
    # A flat line is drawn in the middle.
    scale = (len(blocks) - 1) / (high - low) if high > low else 0.0
    middle = 0 if high > low else len(blocks) // 2
    return "".join(
        blocks[middle + round((x - low) * scale)] if math.isfinite(x) else " " for x in means
    )


def direction(values: Sequence[float]) -> int | None:
    """Returns 1 where the latest values rise, -1 where they fall, and 0 where neither is certain.

    `None`: they are too few.
    """
    recent = [x for x in values[-_RECENT:] if math.isfinite(x)]
    if len(recent) < _LEAST:
        return None
    half = len(recent) // 2
    older, newer = np.array(recent[:half]), np.array(recent[half:])
    error = math.sqrt(older.var(ddof=1) / len(older) + newer.var(ddof=1) / len(newer))
    difference = float(newer.mean() - older.mean())
    return 0 if abs(difference) <= _ERRORS * error else int(math.copysign(1, difference))


def _mean(values: Sequence[float]) -> float:
    finite = [x for x in values if math.isfinite(x)]
    return statistics.fmean(finite) if finite else math.nan
