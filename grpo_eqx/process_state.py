"""State of this process that code of the user's own may change, and that is put back after it.

What is called here after such code has names of its own, whatever the code puts into modules.
"""

import builtins
import contextlib
import gc
import os
import resource
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from fcntl import F_GETFL, F_SETFL, fcntl
from locale import LC_ALL, setlocale
from os import _exit, chdir, close, dup, dup2, environ, fstat, getcwd, getpid, umask
from random import getstate, setstate
from resource import getrlimit, setrlimit
from signal import (
    ITIMER_PROF,
    ITIMER_REAL,
    ITIMER_VIRTUAL,
    SIG_BLOCK,
    SIG_SETMASK,
    getitimer,
    getsignal,
    pthread_sigmask,
    set_wakeup_fd,
    setitimer,
    signal,
    valid_signals,
)
from socket import getdefaulttimeout, setdefaulttimeout
from sys import getprofile, getrecursionlimit, gettrace, setprofile, setrecursionlimit, settrace
from threading import current_thread, main_thread
from typing import Any, Final, NamedTuple

import jax
import numpy as np
from numpy.random import get_state, set_state

from grpo_eqx.clean_text import print_clean
from grpo_eqx.errors import listed

_NAMES: Final = [vars(module) for module in (builtins, os, shutil, subprocess)]
"""Names of Python's own that the run needs, and that guards around the code of a model replace."""
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
    with contextlib.suppress(OSError), open("/proc/self/status", errors="replace") as status:
        for line in status:
            if line.startswith("Umask:"):
                return int(line[6:], 8)
    return None


def _set_environment(before: Mapping[str, str]) -> None:
    for name in {*environ, *before}:
        if name not in before:
            del environ[name]
        elif environ.get(name) != before[name]:
            environ[name] = before[name]


def _set_path(before: list[str]) -> None:
    sys.path[:] = before


def _set_tracing(before: tuple[Any, Any]) -> None:
    settrace(before[0])
    setprofile(before[1])


def _set_collection(before: tuple[bool, tuple[int, int, int]]) -> None:
    (gc.enable if before[0] else gc.disable)()
    gc.set_threshold(*before[1])


def _in_main_thread() -> bool:
    """Returns whether this thread can set what concerns signals, as the main thread alone can."""
    return current_thread() is main_thread()


def _handlers() -> dict[int, Any]:
    if not _in_main_thread():
        return {}
    handlers = {number: getsignal(number) for number in valid_signals()}
    return {number: handler for number, handler in handlers.items() if handler is not None}


def _wakeup() -> int | None:
    """Returns the descriptor that Python writes signals to, which `asyncio` takes away."""
    if not _in_main_thread():
        return None
    number = set_wakeup_fd(-1)
    _set_wakeup(number)
    return number


def _set_wakeup(number: int) -> None:
    set_wakeup_fd(number, warn_on_full_buffer=False)


def _timers() -> dict[int, bool]:
    """Returns whether each of the timers is set: what is left of it changes by itself."""
    clocks = ITIMER_REAL, ITIMER_VIRTUAL, ITIMER_PROF
    return {clock: getitimer(clock)[0] > 0 for clock in clocks}


def _streams() -> dict[str, Any]:
    """Returns Python's streams; in place of those that are closed, `None`."""
    streams = {name: getattr(sys, name) for name in _STREAMS}
    return {name: None if _is_closed(x) else x for name, x in streams.items()}


def _is_closed(stream: Any) -> bool:
    try:
        return bool(stream.closed)
    except Exception:  # there is none, or it is no stream
        return False


def _restore_stream(name: str, before: Any) -> None:
    if _is_closed(before):  # one like it takes its place
        number, mode = _STREAMS[name]
        before = open(number, mode, closefd=False)  # noqa: SIM115
    setattr(sys, name, before)


def _limits() -> dict[int, tuple[int, int]]:
    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    return {each: getrlimit(each) for each in (getattr(resource, x) for x in names)}


def _strict_warnings() -> list[Any]:
    """Returns the filters that make warnings errors."""
    return [each for each in warnings.filters if each[0] == "error"]


def _restore_warnings(before: list[Any]) -> None:
    filters = warnings.filters
    filters[:] = [x for x in filters if x[0] != "error" or x in before]  # type: ignore[index]


def _draws() -> Any:
    """Returns the states of the global random numbers of Python and NumPy."""
    name, keys, *rest = get_state(legacy=True)
    return getstate(), name, np.asarray(keys).tobytes(), *rest


def _set_draws(state: Any) -> None:
    of_python, name, keys, *rest = state
    setstate(of_python)
    set_state((name, np.frombuffer(keys, np.uint32), *rest))


_DRAWS: Final = "the global random numbers"
_OWN: Final[Mapping[str, _Kind]] = {
    _DRAWS: _Kind(_draws, _set_draws),
    "the environment": _Kind(lambda: dict(environ), _set_environment),
    "the path of modules": _Kind(lambda: list(sys.path), _set_path),
}
"""Kinds of state that each caller has for itself, with what its earlier calls left."""
_KINDS: Final[Mapping[str, _Kind]] = {
    "what traces calls": _Kind(lambda: (gettrace(), getprofile()), _set_tracing),
    "a timer": _each(_timers, lambda clock, was_set: was_set or setitimer(clock, 0)),
    "the handlers of signals": _each(_handlers, signal),
    "the descriptor of signals": _Kind(_wakeup, _set_wakeup),
    "the blocked signals": _Kind(
        lambda: pthread_sigmask(SIG_BLOCK, []),
        lambda before: pthread_sigmask(SIG_SETMASK, before),
    ),
    "the standard streams": _each(_streams, _restore_stream),
    "the working directory": _Kind(getcwd, chdir),
    "the mode of new files": _Kind(_file_mode, umask),
    "limits on resources": _each(_limits, setrlimit),
    "the locale": _Kind(lambda: setlocale(LC_ALL), lambda before: setlocale(LC_ALL, before)),
    "the limit on recursion": _Kind(getrecursionlimit, setrecursionlimit),
    "garbage collection": _Kind(lambda: (gc.isenabled(), gc.get_threshold()), _set_collection),
    "the timeout of sockets": _Kind(
        lambda: (getdefaulttimeout(),), lambda x: setdefaulttimeout(*x)
    ),
    "the filters of warnings": _Kind(_strict_warnings, _restore_warnings),
    "NumPy's answer to overflows": _Kind(np.geterr, lambda before: np.seterr(**before)),
    "settings of JAX": _each(lambda: dict(jax.config.values), jax.config.update),
    **_OWN,
}
"""Kinds of state, by their names in messages."""


class KeptState:
    """Keeper of this process's state around calls of the user's code.

    Each caller has the global random numbers of Python and NumPy, the environment and the path of
    modules for itself: what one draws or sets changes those of no other, nor the run's.
    """

    def __init__(self) -> None:
        self._said: set[tuple[str, str]] = set()
        self.own: dict[str, dict[str, Any]] = {}
        """States by caller and kind, where these differ from the run's."""

    def around(self, caller: str) -> contextlib.AbstractContextManager[None]:
        """Puts back what is changed inside, and says so, once for each kind of each caller.

        A process that is forked inside and comes out ends: its parent goes on with the run.
        **Arguments:** the name of what is called, for messages.
        """
        return _Around(self, caller)

    def say(self, caller: str, changed: Sequence[str], lost: Sequence[str]) -> None:
        """Says what was changed, but for random numbers, which are there to be drawn."""
        new = [x for x in changed if x != _DRAWS and (caller, x) not in self._said]
        for kinds, what in ((set(new) - set(lost), "undid"), (lost, "could not undo")):
            if said := [x for x in new if x in kinds]:
                warn(f"{caller} changed {listed(said)}: the run {what} that")
        self._said |= {(caller, name) for name in new}


class _Around(contextlib.AbstractContextManager[None]):
    """State before a call. A generator in its place would be woken by a name of Python's."""

    def __init__(self, state: KeptState, caller: str):
        self._state, self._caller = state, caller

    def __enter__(self) -> None:
        self._process, self._descriptors = getpid(), _Descriptors()
        self._names = [(names, names.copy()) for names in _NAMES]
        self._before = {name: state for name in _KINDS if (state := _read(name)) is not None}
        for name, state in self._state.own.get(self._caller, {}).items():
            _restored(name, state)

    def __exit__(self, *_: object) -> None:
        changed = []
        for names, before in self._names:
            for name, value in before.items():  # first of all, and without a call of one of them
                if names.get(name) is not value:
                    changed, names[name] = ["names of Python's own"], value
        if getpid() != self._process:
            _exit(0)
        changed += ["the standard descriptors"] * self._descriptors.restore()
        given = self._before | self._state.own.get(self._caller, {})
        now = {name: _read(name) for name in given}
        changed += [name for name, state in given.items() if now[name] != state]
        other = {name: state for name, state in self._before.items() if now[name] != state}
        self._state.own[self._caller] = {name: now[name] for name in other if name in _OWN}
        lost = [name for name, state in other.items() if not _restored(name, state)]
        self._state.say(self._caller, changed, lost)


class _Descriptors:
    """Files of the standard descriptors, with copies to put them back."""

    def __init__(self) -> None:
        self._files = _standard_files()
        self._copies = {number: dup(number) for number in self._files}

    def restore(self) -> bool:
        """Puts back those that are closed or are other files; returns whether there are any."""
        now = _standard_files()
        changed = [number for number, file in self._files.items() if now.get(number) != file]
        for number, copy in self._copies.items():
            with contextlib.suppress(OSError):  # the copy is closed too
                if number in changed:
                    dup2(copy, number)
                    fcntl(number, F_SETFL, self._files[number][-1])
                close(copy)
        return bool(changed)


def _standard_files() -> dict[int, tuple[int, int, int]]:
    """Returns the files of the standard descriptors, and flags such as whether a write waits."""
    found = {}
    for number, _ in _STREAMS.values():
        with contextlib.suppress(OSError):  # it is closed
            status = fstat(number)
            found[number] = status.st_dev, status.st_ino, fcntl(number, F_GETFL)
    return found


def _read(name: str) -> Any:
    """Returns the state of a kind; `None` where it has none, as a folder that is removed."""
    try:
        return _KINDS[name].read()
    except Exception:  # of the operating system, or of a stream of the user's own
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
