"""Lines that sum up a run: its step, its reward and its trend, completions and speed."""

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence

from rich.text import Text

from grpo_eqx.common.clean_text import clean
from grpo_eqx.tracking.durations import readable_seconds
from grpo_eqx.tracking.memory_in_use import memory_in_use
from grpo_eqx.tracking.phases import PHASES
from grpo_eqx.tracking.trend import direction, sparkline

_WIDEST = 120
_LABEL, _VALUE, _ACCENT, _WARNING = "dim", "", "cyan", "yellow"
_UNKNOWN = "-"
_MANY_TRUNCATED = 0.5
_ARROWS = {1: ("↗", "green"), 0: ("→", "dim"), -1: ("↘", "red"), None: (" ", "")}
_ASCII_ARROWS = {1: "^", 0: ">", -1: "v", None: " "}
_CELLS, _NARROWEST_CELL = 4, 19
"""Cells of a row of numbers, and the columns that each needs; what has no room is left out."""


@dataclasses.dataclass
class Dashboard:
    """Lines of a live display, of a width that they are asked for."""

    steps: int
    done: int
    rewards: list[float]
    """Mean reward of each step so far."""
    ascii_only: bool = False
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """The last step's."""
    seconds_left: float | None = None
    """Estimate from when that step ended."""
    began: float = dataclasses.field(default_factory=time.monotonic)
    stepped: float = dataclasses.field(default_factory=time.monotonic)
    """When the last step ended, later by the time that phases have taken since."""
    stopped: bool = False
    """Whether no more steps are made."""
    _looked: float = dataclasses.field(default_factory=time.monotonic)
    """When the time left was last asked for."""

    def lines(self, width: int) -> list[Text]:
        """Returns five lines of at most `width` columns; the last says what takes a while."""
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
        # Twice as fine as characters.
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
            # An evaluation or a compilation: no part of the steps that the estimate is of.
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
    """Returns a metric as text, or a dash where it is not known or no number."""
    value = metrics.get(name, math.nan)
    return form.format(value) if math.isfinite(value) else _UNKNOWN
