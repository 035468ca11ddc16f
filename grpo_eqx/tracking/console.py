"""Console output during a run."""

import time
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    track,
)

from grpo_eqx.distributed.startup import is_main

_LINE_EVERY_S = 10.0


def track_on_terminal(items: Sequence[int], description: str) -> Iterable[int]:
    """Iterates with a progress bar, shown only on the main process's terminal and then removed."""
    console = Console()
    hidden = not (console.is_terminal and is_main())
    return track(items, description, console=console, transient=True, disable=hidden)


class TrainingDisplay:
    """Live bar with reward, length and time left; without a terminal, a line every few seconds."""

    def __init__(self, steps: int, console: Console | None = None, *, done: int = 0):
        """**Arguments:** the steps of the run; the console; how many were done before."""
        self.steps = steps
        self.done = done
        self.console = Console() if console is None else console
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("[bold]reward {task.fields[reward]}[/]  length {task.fields[length]}"),
            TextColumn("·"),
            TimeElapsedColumn(),
            TextColumn("elapsed,"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=self.console,
        )
        self._task = self._progress.add_task(
            "", total=steps, completed=done, reward="   -", length="  -"
        )
        self._start = self._last_line = time.monotonic()

    def __enter__(self) -> "TrainingDisplay":
        if self.console.is_terminal:
            self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.console.is_terminal:
            self._progress.stop()

    def note(self, text: str) -> None:
        """Prints a separate line, above a live bar."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows the metrics after `step`, counted from 1."""
        reward, length = f"{metrics['reward']:.3f}", f"{metrics['completions/mean_length']:.1f}"
        if self.console.is_terminal:
            self._progress.update(self._task, completed=step, reward=reward, length=length)
            return
        now = time.monotonic()
        if step not in (self.done + 1, self.steps) and now - self._last_line < _LINE_EVERY_S:
            return
        self._last_line = now
        left = (now - self._start) / (step - self.done) * (self.steps - step)
        self.note(
            f"step {step}/{self.steps}  reward {reward}  length {length}  "
            f"{metrics['step_time']:.2f} s/step  {left:.0f} s left"
        )
