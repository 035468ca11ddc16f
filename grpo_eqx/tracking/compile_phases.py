"""Phases in which programs are compiled, and how long they took in earlier runs."""

import contextlib
import json
from pathlib import Path

import jax

from grpo_eqx.common.durable import write_whole
from grpo_eqx.common.errors import FileError
from grpo_eqx.common.plain_data import is_a
from grpo_eqx.common.read_files import read_object
from grpo_eqx.tracking.durations import readable_seconds
from grpo_eqx.tracking.phases import PHASES, Phase
from grpo_eqx.tracking.stages import Stages
from grpo_eqx.training.compilation import when_compiled

_FILE = "grpo_eqx_compile_seconds.json"
_MOST_ENTRIES = 500
_WORTH_KNOWING_S = 1.0


class CompileTimes:
    """Seconds of the last compilation of each program, in a file beside JAX's compilation cache.

    A program is known by its name, model and devices: with other batches or lengths, the time is of
    the same order. A file that cannot be read or written is ignored.
    """

    def __init__(self, cache: str | None, model: str, mesh: jax.sharding.Mesh):
        """**Arguments:**

        - `cache`: the folder of JAX's compilation cache, if any.
        - `model`, `mesh`: the name of the model, and the devices.
        """
        on_disk = cache is not None and "://" not in cache
        self._path = Path(cache, _FILE) if cache is not None and on_disk else None
        self._run = f"{model} on {mesh.size} x {mesh.devices.flat[0].device_kind}"

    def before(self, program: str) -> float | None:
        """Returns the seconds that a program took, if known."""
        return self._read().get(self._key(program))

    def remember(self, program: str, seconds: float) -> None:
        """Records the seconds that a program took."""
        if self._path is None or seconds < _WORTH_KNOWING_S:
            return
        entries = self._read()
        entries.pop(self._key(program), None)  # the newest are last
        entries[self._key(program)] = round(seconds, 1)
        kept = dict(list(entries.items())[-_MOST_ENTRIES:])
        with contextlib.suppress(OSError):
            write_whole(self._path, json.dumps(kept, indent=1) + "\n")

    def _key(self, program: str) -> str:
        return f"{program} of {self._run}"

    def _read(self) -> dict[str, float]:
        if self._path is None:
            return {}
        try:
            entries = read_object(self._path)
        except FileError:
            return {}
        return {name: float(seconds) for name, seconds in entries.items() if is_a(seconds, float)}


class CompilePhases:
    """Tells when programs are compiled, in a live display or else in a line."""

    def __init__(self, stages: Stages, times: CompileTimes):
        self._stages, self._times = stages, times

    def begin(self, program: str) -> None:
        """Begins the phase of a program, which ends when the calling thread has compiled it."""
        before = self._times.before(program)
        phase = Phase(f"compiling {program}", before)

        def done(was_cached: bool) -> None:
            PHASES.end(phase)
            if not was_cached:
                self._times.remember(program, phase.seconds)

        PHASES.begin(phase)
        when_compiled(f"{program}_program", done)  # as Compiler names the function
        if not PHASES.are_shown:
            took = "" if before is None else f" ({readable_seconds(before)}, unless it is cached)"
            self._stages.say(f"{phase.text}{took}")
