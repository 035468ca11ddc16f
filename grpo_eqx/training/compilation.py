"""Persistent compilation cache, and counts of compiled programs."""

import os
import tempfile
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax import monitoring

from grpo_eqx.common.clean_text import clean

_LEAST_SECONDS = 0.5
"""Minimum compile time of a program that is worth a cache file."""


def cache_folder(name: str) -> Path:
    """Returns the folder in which this package caches things of one kind; does not create it.

    `grpo_eqx/NAME` under `$XDG_CACHE_HOME`, by default `~/.cache`. Raises `RuntimeError` for a user
    without a home.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "grpo_eqx", name)


def use_compilation_cache() -> str | None:
    """Turns on JAX's cache of compiled programs, so that the next run need not recompile them.

    Its folder is `grpo_eqx/jax` under `$XDG_CACHE_HOME`, by default `~/.cache`. JAX's own settings
    take precedence: a folder that the user chose is kept, along with the settings that go with it,
    and `JAX_ENABLE_COMPILATION_CACHE=false` turns the cache off. Warns if the folder cannot be
    written. Call this after `jax.distributed.initialize`.

    **Returns:** the folder, or `None` without a cache.
    """
    settings: Any = jax.config  # its attributes are created at run time
    if not settings.jax_enable_compilation_cache:
        return None
    if settings.jax_compilation_cache_dir is not None:
        return settings.jax_compilation_cache_dir or None
    # Only the first process writes. Processes that cannot see its folder would compile what it
    # loads, and on GPUs wait for its part of the autotuning.
    if jax.process_count() > 1:
        return None
    try:
        folder = cache_folder("jax")
        # Cached programs are executed: nobody else may write them.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except (OSError, RuntimeError) as error:
        warnings.warn(
            clean(
                f"compiled programs are not cached ({error}): set JAX_COMPILATION_CACHE_DIR to a "
                "writable folder, or JAX_ENABLE_COMPILATION_CACHE=false."
            ),
            stacklevel=2,
        )
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", _LEAST_SECONDS)
    return str(folder)


class CompilationCounter:
    """Counter of the programs that this process compiles after the counter is created."""

    def __init__(self) -> None:
        self._start = dict(_totals)

    def metrics(self) -> dict[str, float]:
        """Returns the programs compiled or loaded, those only loaded, and the time in seconds."""
        return {name: total - self._start[name] for name, total in _totals.items()}


def when_compiled(program: str, done: Callable[[bool], None]) -> None:
    """Has `done` called once this thread has compiled the program that it is tracing.

    **Arguments:**

    - `program`: part of the name of the function that is compiled.
    - `done`: called with whether the cache of JAX had the program.
    """
    _here.awaited = program, done
    _here.was_cached = False


class _OfThread(threading.local):
    """The program that a thread is compiling, if anybody waits for it."""

    awaited: tuple[str, Callable[[bool], None]] | None = None
    was_cached = False


_here = _OfThread()
_totals = {"compile/num_programs": 0.0, "compile/num_cache_hits": 0.0, "compile/seconds": 0.0}


def _count_hit(event: str, **_: str | int) -> None:
    if event == "/jax/compilation_cache/cache_hits":
        _totals["compile/num_cache_hits"] += 1
        _here.was_cached = True


def _count_program(event: str, duration_secs: float, **about: str | int) -> None:
    # JAX records this event for programs found in the cache as well.
    if event == "/jax/core/compile/backend_compile_duration":
        _totals["compile/num_programs"] += 1
        _totals["compile/seconds"] += duration_secs
        if _here.awaited is not None and _here.awaited[0] in str(about.get("fun_name", "")):
            (_, done), _here.awaited = _here.awaited, None
            done(_here.was_cached)


# Registered once per process: not every version of JAX can remove a listener.
monitoring.register_event_listener(_count_hit)
monitoring.register_event_duration_secs_listener(_count_program)
