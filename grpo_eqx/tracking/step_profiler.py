"""Traces of a run's steps, by JAX's profiler."""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import jax

from grpo_eqx.settings.types import parse_steps

_Function = TypeVar("_Function", bound=Callable[..., object])
_STEP = "train step"
"""Name of steps in a trace, which tools for traces look for."""


def phase(name: str) -> Callable[[_Function], _Function]:
    """Returns a decorator that names the calls of a function in traces.

    The phases of a step have the names of the laps in `time/train/*`.
    """

    def named(function: _Function) -> _Function:
        return jax.profiler.annotate_function(function, name=name)

    return named


class StepProfiler:
    """Profiler of some steps of a run while it is entered; the first process traces its devices.

    JAX takes one trace at a time: if the user's program is taking one, steps are not profiled.
    """

    def __init__(
        self,
        steps: str | None,
        folder: Path,
        note: Callable[[str], None],
        *,
        of_memory: bool = False,
    ):
        """**Arguments:**

        - `steps`: the setting `profile_steps`.
        - `folder`: the folder to write to.
        - `note`: shows the user a line.
        - `of_memory`: whether to write a profile of the devices' memory after each of the steps.
        """
        self.steps = range(0) if steps is None else parse_steps("profile_steps", steps)
        self.folder = folder
        self._note = note
        self._of_memory = of_memory
        self._tracing = False
        self._annotation: jax.profiler.StepTraceAnnotation | None = None
        self._current = self._last = 0

    def __enter__(self) -> "StepProfiler":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._end_step(failed=kind is not None)
        self._stop()

    def begin(self, step: int) -> float:
        """Ends the previous step and begins `step`, counted from 1.

        **Returns:** the seconds that this took, which do not belong to a step.
        """
        began = time.perf_counter()
        self._begin(step)
        return time.perf_counter() - began

    def _begin(self, step: int) -> None:
        first_call = self._current == 0
        self._end_step()
        self._current = step
        if step not in self.steps:
            self._stop()
            if first_call and self.steps and step > self.steps[-1]:
                self._note(
                    f"note: profile_steps {self.steps[0]}:{self.steps[-1]} are done already, and "
                    f"are not profiled: the run continues with step {step}."
                )
            return
        if not self._tracing:
            self._start()
        if self._tracing:
            self._annotation = jax.profiler.StepTraceAnnotation(_STEP, step_num=step)
            self._annotation.__enter__()

    def end(self) -> float:
        """Ends the step, and also the trace if the next step is not profiled.

        **Returns:** the seconds that this took, which do not belong to a step.
        """
        began = time.perf_counter()
        self._end_step()
        if self._current + 1 not in self.steps:
            self._stop()
        return time.perf_counter() - began

    def _start(self) -> None:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # Python's own calls would bury the phases
        try:
            jax.profiler.start_trace(self.folder, profiler_options=options)
        except (RuntimeError, ValueError) as error:  # such as a trace of the user's own
            self._note(f"note: steps are not profiled: {error}")
            self.steps = range(0)
            return
        self._tracing = True

    def _end_step(self, *, failed: bool = False) -> None:
        if self._annotation is None:
            return
        self._annotation.__exit__(None, None, None)
        self._annotation, self._last = None, self._current
        if self._of_memory and not failed:
            with self._written("what is in memory"):
                self.folder.mkdir(parents=True, exist_ok=True)
                path = self.folder / f"memory_step_{self._current:06d}.prof"
                jax.profiler.save_device_memory_profile(str(path))

    def _stop(self) -> None:
        if not self._tracing:
            return
        self._tracing = False
        with self._written("the trace"):
            jax.profiler.stop_trace()
            self._note(f"the trace of steps up to {self._last} is in {self.folder}")

    @contextlib.contextmanager
    def _written(self, what: str) -> Iterator[None]:
        """Turns a failed write, as on a full disk, into a warning: no reason to end a run."""
        try:
            yield
        except (OSError, RuntimeError) as error:
            self._note(f"warning: {what} could not be written: {error}")
