"""Compiling less often: a cache on disk, and a count of what is compiled."""

import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import jax
from jax import monitoring

_LEAST_SECONDS = 0.5
"""What compiles faster is not worth a file."""


def cache_folder(name: str) -> Path:
    """Where this package keeps things of one kind for the next run; not made yet.

    In `grpo_eqx` under `$XDG_CACHE_HOME`, by default `~/.cache`. Raises `RuntimeError` for a user
    without a home.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "grpo_eqx", name)


def use_compilation_cache() -> str | None:
    """Turns JAX's cache of compiled programs on, so that the next run need not compile them again.

    It lies in `grpo_eqx/jax` under `$XDG_CACHE_HOME`, by default `~/.cache`. JAX's own settings go
    before: a folder that the user chose stays, with all that belongs to it, and
    `JAX_ENABLE_COMPILATION_CACHE=false` turns the cache off. Warns of a folder that cannot be
    written. To be called after `jax.distributed.initialize`.

    **Returns:** the folder, or `None` without a cache.
    """
    settings: Any = jax.config  # its attributes are made at run time
    if not settings.jax_enable_compilation_cache:
        return None
    if settings.jax_compilation_cache_dir is not None:
        return settings.jax_compilation_cache_dir or None
    # Only the first process writes. Where the others do not see its folder they would compile what
    # it loads, and on GPUs wait for its part of the autotuning.
    if jax.process_count() > 1:
        return None
    try:
        folder = cache_folder("jax")
        # Programs are loaded and run: nobody else may write them.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except (OSError, RuntimeError) as error:
        warnings.warn(
            f"compiled programs are not kept ({error}): set JAX_COMPILATION_CACHE_DIR to a folder "
            "that can be written, or JAX_ENABLE_COMPILATION_CACHE=false.",
            stacklevel=2,
        )
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", _LEAST_SECONDS)
    return str(folder)


class CompilationCounter:
    """Counts what this process compiles from the counter's making on."""

    def __init__(self) -> None:
        self._start = dict(_totals)

    def metrics(self) -> dict[str, float]:
        """Programs that were compiled or loaded, those of them that were loaded, and the time."""
        return {name: total - self._start[name] for name, total in _totals.items()}


_totals = {"compile/num_programs": 0.0, "compile/num_cache_hits": 0.0, "compile/seconds": 0.0}


def _count_hit(event: str, **_: str | int) -> None:
    if event == "/jax/compilation_cache/cache_hits":
        _totals["compile/num_cache_hits"] += 1


def _count_program(event: str, duration_secs: float, **_: str | int) -> None:
    # JAX records this one also for a program that it finds in the cache.
    if event == "/jax/core/compile/backend_compile_duration":
        _totals["compile/num_programs"] += 1
        _totals["compile/seconds"] += duration_secs


# Once for the process: not every version of JAX can remove a listener.
monitoring.register_event_listener(_count_hit)
monitoring.register_event_duration_secs_listener(_count_program)
