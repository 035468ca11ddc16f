"""Display of a run's steps, live or in lines."""

import contextlib
import textwrap
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from grpo_eqx.tracking.completions_view import as_table
from grpo_eqx.tracking.dashboard import Dashboard
from grpo_eqx.tracking.durations import TimeLeft, readable_seconds
from grpo_eqx.tracking.live_lines import LiveLines
from grpo_eqx.tracking.phases import PHASES
from grpo_eqx.tracking.safe_console import safe_console

_LINE_EVERY_S = 10.0


class TrainingDisplay:
    """Live dashboard on a terminal; elsewhere, a line every few seconds."""

    def __init__(
        self,
        steps: int,
        console: Console | None = None,
        *,
        done: int = 0,
        rewards: Sequence[float] = (),
    ):
        """**Arguments:**

        - `steps`: the steps of the run.
        - `console`: the console, by default a safe one on standard output.
        - `done`, `rewards`: the steps that are done already, and their mean rewards.
        """
        self.steps = steps
        self.done = done
        self.console = safe_console() if console is None else console
        self._is_live = self.console.is_terminal and not self.console.is_dumb_terminal
        ascii_only = self.console.options.ascii_only
        self._dashboard = Dashboard(steps, done, list(rewards), ascii_only)
        self._lines: LiveLines | None = None
        self._entered = contextlib.ExitStack()
        self._last_line = time.monotonic()
        self._time_left = TimeLeft()
        self._left_out: tuple[int, Mapping[str, float]] | None = None

    def __enter__(self) -> "TrainingDisplay":
        if self._is_live:
            with contextlib.ExitStack() as entered:
                entered.enter_context(PHASES.shown())
                lines = LiveLines(self.console, self._dashboard.lines)
                self._lines = entered.enter_context(lines)
                self._entered = entered.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._lines = None
        self._dashboard.stopped = True
        self._entered.close()

    def note(self, text: str) -> None:
        """Prints a separate line; above live lines it is wrapped between words."""
        if self._lines is not None:  # rich would break long paths
            width = self._lines.width
            text = textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def completions(self, columns: Mapping[str, Sequence[Any]], number: int) -> None:
        """Prints some of a step's completions, from the best to the worst."""
        console = self.console
        console.print(as_table(columns, number, console.width - 1, console.encoding))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows the metrics after `step`, counted from 1."""
        self._time_left.add(metrics["step_time"], compiled=metrics["compile/num_programs"] > 0)
        left = self._time_left.of(self.steps - step)
        shown = self._dashboard
        shown.done, shown.metrics, shown.seconds_left = step, metrics, left
        shown.rewards.append(metrics["reward"])
        shown.stepped = time.monotonic()
        if self._lines is not None:
            self._lines.refresh()
        elif not self._is_live:
            self._print_line(step, metrics, left)

    def stopped(self) -> None:
        """Shows that the run has stopped, and prints the last step's line if it was left out."""
        self._dashboard.stopped = True
        if self._lines is not None:
            self._lines.refresh()
        elif self._left_out is not None:
            step, metrics = self._left_out
            self._left_out = None
            self.note(self._line(step, metrics))

    def _print_line(self, step: int, metrics: Mapping[str, float], left: float | None) -> None:
        """Prints a step's metrics, unless another step's line was printed a moment ago."""
        now = time.monotonic()
        if step not in (self.done + 1, self.steps) and now - self._last_line < _LINE_EVERY_S:
            self._left_out = step, metrics
            return
        self._last_line, self._left_out = now, None
        remaining = "" if left is None else f"  {readable_seconds(left)} left"
        self.note(self._line(step, metrics) + remaining)

    def _line(self, step: int, metrics: Mapping[str, float]) -> str:
        compiled = metrics["compile/num_programs"] > 0
        # Threads compile before and beside the step, so this may exceed the step's own time.
        share = f" (compiling took {metrics['compile/seconds']:.0f} s)" if compiled else ""
        return (
            f"step {step}/{self.steps}  reward {metrics['reward']:.3f}  "
            f"length {metrics['completions/mean_length']:.1f}  "
            f"{metrics['step_time']:.2f} s{share}"
        )
