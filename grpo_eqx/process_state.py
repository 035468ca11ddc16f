"""State of this process that code of the user's own may change, and that is put back after it."""

import contextlib
import locale
import os
import random
import resource
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import jax
import numpy as np

from grpo_eqx.clean_text import print_clean
from grpo_eqx.errors import listed

_STREAMS: Final = {"stdin": (0, "r"), "stdout": (1, "w"), "stderr": (2, "w")}


class _Kind(NamedTuple):
    """Kind of state: how it is read, and put back."""

    read: Callable[[], Any]
    restore: Callable[[Any], object]


def _each(read: Callable[[], Mapping[Any, Any]], restore: Callable[[Any, Any], object]) -> _Kind:
    """Returns the kind of several states by name, of which those that differ are restored."""

    def restore_all(before: Mapping[Any, Any]) -> None:
        now = read()
        for key, value in before.items():
            if now[key] != value:
                restore(key, value)

    return _Kind(read, restore_all)


def _file_mode() -> int | None:
    """Returns the mask of new files' modes; `None` where it cannot be read without setting it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text(errors="replace").splitlines():
            if line.startswith("Umask:"):
                return int(line[6:], 8)
    return None


def _handlers() -> dict[int, Any]:
    """Returns Python's handlers of signals, which the main thread alone can set."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {
        number: handler
        for number in signal.valid_signals()
        if (handler := signal.getsignal(number)) is not None
    }


def _wakeup() -> int | None:
    """Returns the descriptor that Python writes signals to, which `asyncio` takes away."""
    if threading.current_thread() is not threading.main_thread():
        return None
    number = signal.set_wakeup_fd(-1)
    _set_wakeup(number)
    return number


def _set_wakeup(number: int) -> None:
    signal.set_wakeup_fd(number, warn_on_full_buffer=False)


def _timers() -> dict[int, bool]:
    """Returns whether each of the timers is set: what is left of it changes by itself."""
    clocks = signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF
    return {clock: signal.getitimer(clock)[0] > 0 for clock in clocks}


def _streams() -> dict[str, Any]:
    """Returns Python's streams; in place of those that are closed, `None`."""
    streams = {name: getattr(sys, name) for name in _STREAMS}
    return {name: None if getattr(x, "closed", False) else x for name, x in streams.items()}


def _restore_stream(name: str, before: Any) -> None:
    if getattr(before, "closed", False):  # one like it takes its place
        number, mode = _STREAMS[name]
        before = open(number, mode, closefd=False)  # noqa: SIM115
    setattr(sys, name, before)


def _limits() -> dict[int, tuple[int, int]]:
    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    return {each: resource.getrlimit(each) for each in (getattr(resource, x) for x in names)}


def _strict_warnings() -> list[Any]:
    """Returns the filters that make warnings errors."""
    return [each for each in warnings.filters if each[0] == "error"]


def _restore_warnings(before: list[Any]) -> None:
    filters = warnings.filters
    filters[:] = [x for x in filters if x[0] != "error" or x in before]  # type: ignore[index]


def _draws() -> Any:
    """Returns the states of the global random numbers of Python and NumPy."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), name, np.asarray(keys).tobytes(), *rest


def _set_draws(state: Any) -> None:
    of_python, name, keys, *rest = state
    random.setstate(of_python)
    np.random.set_state((name, np.frombuffer(keys, np.uint32), *rest))


_KINDS: Final[Mapping[str, _Kind]] = {
    "a timer": _each(_timers, lambda clock, was_set: was_set or signal.setitimer(clock, 0)),
    "the handlers of signals": _each(_handlers, signal.signal),
    "the descriptor of signals": _Kind(_wakeup, _set_wakeup),
    "the blocked signals": _Kind(
        lambda: signal.pthread_sigmask(signal.SIG_BLOCK, []),
        lambda before: signal.pthread_sigmask(signal.SIG_SETMASK, before),
    ),
    "the standard streams": _each(_streams, _restore_stream),
    "the working directory": _Kind(os.getcwd, os.chdir),
    "the mode of new files": _Kind(_file_mode, os.umask),
    "limits on resources": _each(_limits, resource.setrlimit),
    "the locale": _Kind(
        lambda: locale.setlocale(locale.LC_ALL),
        lambda before: locale.setlocale(locale.LC_ALL, before),
    ),
    "the limit on recursion": _Kind(sys.getrecursionlimit, sys.setrecursionlimit),
    "the filters of warnings": _Kind(_strict_warnings, _restore_warnings),
    "NumPy's answer to overflows": _Kind(np.geterr, lambda before: np.seterr(**before)),
    "settings of JAX": _each(lambda: dict(jax.config.values), jax.config.update),
}
"""Kinds of state, by their names in messages."""


class KeptState:
    """Keeper of this process's state around calls of the user's code.

    Each caller has the global random numbers of Python and NumPy for itself: what one draws or
    seeds changes those of no other, nor the run's.
    """

    def __init__(self) -> None:
        self._said: set[tuple[str, str]] = set()
        self._draws: dict[str, Any] = {}

    @contextlib.contextmanager
    def around(self, caller: str, *, alone: bool = True) -> Iterator[None]:
        """Puts back what is changed inside, and says so, once for each kind of each caller.

        A process that is forked inside and comes out ends: its parent goes on with the run.

        **Arguments:** what is called, for messages; whether nothing else draws random numbers
        meanwhile, so that who does is known.
        """
        process, descriptors = os.getpid(), _Descriptors()
        before = {name: state for name in _KINDS if (state := _read(name)) is not None}
        draws = _draws()
        if caller in self._draws:
            _set_draws(self._draws[caller])
        given = _draws()
        try:
            yield
        finally:
            if os.getpid() != process:
                os._exit(0)
            own = self._draws[caller] = _draws()
            _set_draws(draws)
            changed = ["the standard descriptors"] * descriptors.restore()
            changed += [name for name, state in before.items() if _read(name) != state]
            lost = [x for x in changed if x in before and not _restored(x, before[x])]
        changed += ["the global random numbers"] * (alone and own != given)
        for kinds, what in ((set(changed) - set(lost), "undid"), (lost, "could not undo")):
            new = [x for x in changed if x in kinds and (caller, x) not in self._said]
            if new:
                warn(f"{caller} changed {listed(new)}: the run {what} that")
        self._said |= {(caller, name) for name in changed}


class _Descriptors:
    """Files of the standard descriptors, with copies to put them back."""

    def __init__(self) -> None:
        self._files = _standard_files()
        self._copies = {number: os.dup(number) for number in self._files}

    def restore(self) -> bool:
        """Puts back those that are closed or are other files; returns whether there are any."""
        now = _standard_files()
        changed = [number for number, file in self._files.items() if now.get(number) != file]
        for number, copy in self._copies.items():
            with contextlib.suppress(OSError):  # the copy is closed too
                if number in changed:
                    os.dup2(copy, number)
                    os.set_blocking(number, self._files[number][-1])
                os.close(copy)
        return bool(changed)


def _standard_files() -> dict[int, tuple[int, int, bool]]:
    """Returns the files of the standard descriptors, and whether writing to them waits."""
    found = {}
    for number, _ in _STREAMS.values():
        with contextlib.suppress(OSError):  # it is closed
            status = os.fstat(number)
            found[number] = status.st_dev, status.st_ino, os.get_blocking(number)
    return found


def _read(name: str) -> Any:
    """Returns the state of a kind; `None` where it has none, as a folder that is removed."""
    try:
        return _KINDS[name].read()
    except OSError:
        return None


def _restored(name: str, before: Any) -> bool:
    """Restores the state of a kind, and returns whether it is as before."""
    try:
        _KINDS[name].restore(before)
    except Exception:  # of whatever class, of the operating system or JAX
        return False
    return True


def warn(text: str) -> None:
    """Prints a warning, unless nobody reads it."""
    with contextlib.suppress(OSError, ValueError):
        print_clean(f"warning: {text}", file=sys.stderr)
