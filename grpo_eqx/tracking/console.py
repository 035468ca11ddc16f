"""Console output during a run."""

import contextlib
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    track,
)

from grpo_eqx.distributed.startup import is_main
from grpo_eqx.errors import EXIT_PIPE_CLOSED

_LINE_EVERY_S = 10.0
_LONG_STAGE_S = 1.0
_STEPS_OF_ESTIMATE = 20
"""Latest steps, of those that compiled nothing, by whose median the time left is estimated."""


class Stages:
    """Lines on standard error that say what a run is doing, with the seconds since it began."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self._lock, self._over = threading.RLock(), False

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    def say(self, text: str) -> None:
        """Says what begins now, on the main process."""
        # Its disk may be full: no reason to end a run.
        with self._lock, contextlib.suppress(OSError):
            if is_main() and not self._over:
                print(f"[{self.seconds:3.0f} s] {text}", file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def silent_after_errors(self) -> Iterator[None]:
        """Says nothing once an error has left the context: threads may still be at work."""
        try:
            yield
        except BaseException:
            with self._lock:
                self._over = True
            raise

    @contextlib.contextmanager
    def lasting(self, text: str) -> Iterator[None]:
        """Says what is done while the context is entered, where that takes some time."""
        timer = threading.Timer(_LONG_STAGE_S, self.say, [text])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


def track_on_terminal(items: Sequence[int], description: str) -> Iterable[int]:
    """Iterates with a progress bar, shown only on the main process's terminal and then removed."""
    console = Console()
    hidden = not (console.is_terminal and is_main())
    return track(items, description, console=console, transient=True, disable=hidden)


class _RunConsole(Console):
    """Console of a run, which ends as a process does whose output nobody reads any more."""

    def on_broken_pipe(self) -> None:
        with contextlib.suppress(SystemExit):  # rich's own, with another exit code
            Console.on_broken_pipe(self)
        raise SystemExit(EXIT_PIPE_CLOSED)


class TrainingDisplay:
    """Live bar with reward, length and time left; without a terminal, a line every few seconds."""

    def __init__(self, steps: int, console: Console | None = None, *, done: int = 0):
        """**Arguments:** the steps of the run; the console; how many were done before."""
        self.steps = steps
        self.done = done
        self.console = _RunConsole() if console is None else console
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("[bold]reward {task.fields[reward]}[/]  length {task.fields[length]}"),
            TextColumn("·"),
            TimeElapsedColumn(),
            TextColumn("elapsed{task.fields[left]}"),
            console=self.console,
        )
        self._task = self._progress.add_task(
            "", total=steps, completed=done, reward="   -", length="  -", left=""
        )
        self._last_line = time.monotonic()
        self._step_times: deque[float] = deque(maxlen=_STEPS_OF_ESTIMATE)

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
        if metrics["compile/num_programs"] == 0:  # else it says nothing about the steps to come
            self._step_times.append(metrics["step_time"])
        left = ""
        if self._step_times:
            seconds = statistics.median(self._step_times) * (self.steps - step)
            left = f"{readable_seconds(seconds)} left"
        if self.console.is_terminal:
            shown: dict[str, Any] = {
                "reward": reward,
                "length": length,
                "left": left and f", {left}",
            }
            self._progress.update(self._task, completed=step, **shown)
            return
        now = time.monotonic()
        if step not in (self.done + 1, self.steps) and now - self._last_line < _LINE_EVERY_S:
            return
        self._last_line = now
        compiled = metrics["compile/num_programs"] > 0
        share = f" ({metrics['compile/seconds']:.0f} s of them compiling)" if compiled else ""
        self.note(
            f"step {step}/{self.steps}  reward {reward}  length {length}  "
            f"{metrics['step_time']:.2f} s{share}  {left}".rstrip()
        )


def readable_seconds(seconds: float) -> str:
    """Returns a duration as people say it: 45 s, 12 min, 3 h 5 min."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
