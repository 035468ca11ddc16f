"""Lines that sum up a run: its step, its reward and its trend, completions and speed."""

import dataclasses
import math
import statistics
import time
from collections.abc import Mapping, Sequence

import numpy as np
from rich.text import Text

from grpo_eqx.common.clean_text import clean
from grpo_eqx.tracking.durations import readable_seconds
from grpo_eqx.tracking.memory import memory_in_use
from grpo_eqx.tracking.phases import PHASES

_WIDEST = 120
_LABEL, _VALUE, _ACCENT, _WARNING = "dim", "", "cyan", "yellow"
_UNKNOWN = "-"
_MANY_TRUNCATED = 0.5
_ARROWS = {1: ("↗", "green"), 0: ("→", "dim"), -1: ("↘", "red"), None: (" ", "")}
_ASCII_ARROWS = {1: "^", 0: ">", -1: "v", None: " "}
_CELLS, _NARROWEST_CELL = 4, 19
"""Cells of a row of numbers, and the columns that each needs; cells without room are left out."""
_BLOCKS, _ASCII_BLOCKS = "▁▂▃▄▅▆▇█", "_.-=+*%@"
_RECENT = 20
"""Latest values whose direction is told."""
_LEAST = 6
"""Fewest values that have a direction."""
_ERRORS = 2.0
"""Standard errors between the means of the older and the newer half of the latest values, from
which a difference counts as a trend. Values without a trend differ by more one time in twenty."""


@dataclasses.dataclass
class Dashboard:
    """Lines of a live display."""

    steps: int
    done: int
    rewards: list[float]
    """Mean reward of each step so far."""
    ascii_only: bool = False
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Metrics of the last step."""
    seconds_left: float | None = None
    """Estimate of the time left, made when the last step ended."""
    began: float = dataclasses.field(default_factory=time.monotonic)
    stepped: float = dataclasses.field(default_factory=time.monotonic)
    """When the last step ended, plus the time that phases have taken since."""
    stopped: bool = False
    """Whether the run makes no more steps."""
    _looked: float = dataclasses.field(default_factory=time.monotonic)
    """When the time left was last asked for."""

    def lines(self, width: int) -> list[Text]:
        """Returns five lines of at most `width` columns; the last names the phase in progress."""
        width = min(width, _WIDEST)
        phase = PHASES.latest
        return [
            self._bar(width),
            self._reward(width),
            _row(width, self._of_completions()),
            _row(width, self._of_the_machine()),
            Text("" if phase is None else clean(str(phase)), style=_ACCENT),
        ]

    def _bar(self, width: int) -> Text:
        line = Text.assemble(
            ("step ", _LABEL), (f"{self.done:,}", "bold"), (f" of {self.steps:,}  ", _LABEL)
        )
        left = Text("  " + self._time_left())
        size = max(0, width - line.cell_len - left.cell_len)
        # Half characters make the bar twice as fine.
        halves = 2 * size * self.done // self.steps
        full, half, rest = ("=", "-", "-") if self.ascii_only else ("━", "╸", "─")
        bar = full * (halves // 2) + half * (halves % 2)
        return line.append(bar, _ACCENT).append(rest * (size - len(bar)), _LABEL).append(left)

    def _time_left(self) -> str:
        if self.done >= self.steps:
            return "done"
        if self.stopped:
            return "stopped"
        now = time.monotonic()
        if PHASES.latest is not None:
            # An evaluation or a compilation, which the estimate for the steps does not include.
            self.stepped += now - max(self.stepped, self._looked)
        self._looked = now
        if self.seconds_left is None:
            return "time left unknown"
        left = max(0.0, self.seconds_left - (now - self.stepped))
        return f"{readable_seconds(left)} left"

    def _reward(self, width: int) -> Text:
        trend = direction(self.rewards)
        arrow, style = _ARROWS[trend]
        line = Text.assemble(
            ("reward ", _LABEL),
            (_number(self.metrics, "reward", "{:.3f}"), "bold"),
            " ",
            (_ASCII_ARROWS[trend] if self.ascii_only else arrow, style),
            "  ",
        )
        finite = [x for x in self.rewards if math.isfinite(x)]
        if not finite:
            return line
        extent = f"  {min(finite):.3f} to {max(finite):.3f}"
        size = max(0, width - line.cell_len - len(extent))
        course = sparkline(self.rewards, size, ascii_only=self.ascii_only)
        return line.append(course.ljust(size), _ACCENT).append(extent, _LABEL)

    def _of_completions(self) -> list[tuple[str, str, str]]:
        """Returns labels, values and styles."""
        clipped = self.metrics.get("completions/clipped_ratio", 0.0)
        cells = [
            ("length", _number(self.metrics, "completions/mean_length", "{:.1f}"), _VALUE),
            (
                "truncated",
                _number(self.metrics, "completions/clipped_ratio", "{:.1%}"),
                _WARNING if clipped > _MANY_TRUNCATED else _VALUE,
            ),
            ("entropy", _number(self.metrics, "entropy", "{:.3f}"), _VALUE),
        ]
        if "kl" in self.metrics:
            cells.append(("KL", _number(self.metrics, "kl", "{:.2g}"), _VALUE))
        return cells

    def _of_the_machine(self) -> list[tuple[str, str, str]]:
        """Returns labels, values and styles."""
        whose, memory = memory_in_use()
        speed = _number(self.metrics, "perf/tokens_per_second/rollout", "{:,.0f}")
        return [
            ("step time", _number(self.metrics, "step_time", "{:.2f} s"), _VALUE),
            ("tokens/s", speed, _VALUE),
            (whose, memory, _VALUE),
            ("elapsed", readable_seconds(time.monotonic() - self.began), _VALUE),
        ]


def _row(width: int, cells: Sequence[tuple[str, str, str]]) -> Text:
    """Returns labels with their values, in columns of one width."""
    count = max(1, min(_CELLS, width // _NARROWEST_CELL))
    line, size = Text(), width // count
    for number, (label, value, style) in enumerate(cells[:count]):
        line.pad_right(max(1 if number else 0, number * size - line.cell_len))
        line.append(f"{label} ", _LABEL).append(value, style)
    return line


def _number(metrics: Mapping[str, float], name: str, form: str) -> str:
    """Returns a metric as text, or a dash where it is missing or not finite."""
    value = metrics.get(name, math.nan)
    return form.format(value) if math.isfinite(value) else _UNKNOWN


def sparkline(values: Sequence[float], width: int, *, ascii_only: bool = False) -> str:
    """Draws all values in at most `width` characters; each character is the mean of equally many.

    The lowest mean has the lowest block, and the highest mean the highest block. A character whose
    values are all not finite is a space.
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

    With too few values, returns `None`.
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
