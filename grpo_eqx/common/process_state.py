"""State of this process that the user's code may change, and that is restored after it.

Functions that are called after the user's code are imported by name, because the code may replace
attributes of modules.
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
from bdb import Bdb
from collections.abc import Callable, Mapping, Sequence
from locale import LC_ALL, setlocale
from os import _exit, chdir, environ, getcwd, getpid, umask
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

from grpo_eqx.common.clean_text import print_clean
from grpo_eqx.common.errors import listed
from grpo_eqx.common.standard_streams import Descriptors, restore_stream, streams

_NAMES: Final = [vars(module) for module in (builtins, os, shutil, subprocess)]
"""Python's own names that the run needs; sandboxes around a model's code replace some of them."""
_DEBUGGERS: Final = "pydevd", "coverage"
"""Beginnings of the names of debuggers' modules, besides Python's own."""


class _Kind(NamedTuple):
    """Kind of state: how it is read, and how it is restored."""

    read: Callable[[], Any]
    restore: Callable[[Any], object]


def _each(read: Callable[[], Mapping[Any, Any]], restore: Callable[[Any, Any], object]) -> _Kind:
    """Returns the kind of several states by key, of which only changed states are restored."""

    def restore_all(before: Mapping[Any, Any]) -> None:
        now = read()
        for key, value in before.items():
            if now.get(key) != value:
                restore(key, value)

    return _Kind(read, restore_all)


def _file_mode() -> int | None:
    """Returns the mask of new files' modes; `None` if it cannot be read without setting it."""
    with contextlib.suppress(OSError), open("/proc/self/status", errors="replace") as status:
        for line in status:
            if line.startswith("Umask:"):
                return int(line[6:], 8)
    return None


def _set_path(before: list[str]) -> None:
    sys.path[:] = [*before, *(each for each in sys.path if each not in before)]


def _tracing() -> dict[Callable[[Any], None], Any]:
    """Returns functions that trace and profile calls, by their setters, except for debuggers."""
    functions = {settrace: gettrace(), setprofile: getprofile()}
    return {set_it: each for set_it, each in functions.items() if not _is_debuggers(each)}


def _is_debuggers(function: Any) -> bool:
    owner = getattr(function, "__self__", function)
    module = getattr(function, "__module__", None) or type(function).__module__
    return isinstance(owner, Bdb) or str(module).lstrip("_").startswith(_DEBUGGERS)


def _set_collection(before: tuple[bool, tuple[int, int, int]]) -> None:
    (gc.enable if before[0] else gc.disable)()
    gc.set_threshold(*before[1])


def _in_main_thread() -> bool:
    """Returns whether this thread can change the handling of signals: only the main thread can."""
    return current_thread() is main_thread()


def _handlers() -> dict[int, Any]:
    if not _in_main_thread():
        return {}
    handlers = {number: getsignal(number) for number in valid_signals()}
    return {number: handler for number, handler in handlers.items() if handler is not None}


def _wakeup() -> int | None:
    """Returns the descriptor that Python writes signals to, which `asyncio` may replace."""
    if not _in_main_thread():
        return None
    number = set_wakeup_fd(-1)
    _set_wakeup(number)
    return number


def _set_wakeup(number: int) -> None:
    set_wakeup_fd(number, warn_on_full_buffer=False)


def _timers() -> dict[int, bool]:
    """Returns whether each timer is set; its remaining time changes by itself."""
    clocks = ITIMER_REAL, ITIMER_VIRTUAL, ITIMER_PROF
    return {clock: getitimer(clock)[0] > 0 for clock in clocks}


def _limits() -> dict[int, tuple[int, int]]:
    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    return {each: getrlimit(each) for each in (getattr(resource, x) for x in names)}


def _strict_warnings() -> tuple[Any, ...]:
    """Returns the filters that make warnings errors."""
    return tuple(each for each in warnings.filters if each[0] == "error")


def _restore_warnings(before: tuple[Any, ...]) -> None:
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
_KINDS: Final[Mapping[str, _Kind]] = {
    "what traces calls": _each(_tracing, lambda set_it, before: set_it(before)),
    "a timer": _each(_timers, lambda clock, was_set: was_set or setitimer(clock, 0)),
    "the handlers of signals": _each(_handlers, signal),
    "the descriptor of signals": _Kind(_wakeup, _set_wakeup),
    "the blocked signals": _Kind(
        lambda: pthread_sigmask(SIG_BLOCK, []),
        lambda before: pthread_sigmask(SIG_SETMASK, before),
    ),
    "the standard streams": _each(streams, restore_stream),
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
    _DRAWS: _Kind(_draws, _set_draws),
    "the environment": _each(lambda: dict(environ), environ.__setitem__),
    "the path of modules": _Kind(lambda: list(sys.path), _set_path),
}
"""Kinds of state, by their names in messages. Entries added to a mapping or list may stay."""
_OF_ALL: Final = {"garbage collection", "the environment", "the path of modules"}
"""Kinds that several functions that run at the same time may change temporarily."""


class StateGuard:
    """Guard that restores this process's state after calls of the user's code.

    Each function has its own global random numbers of Python and NumPy: its draws and seeds change
    neither the run's nor another function's. Additions to the environment and to the path of
    modules stay, because libraries make them once, at their first import.
    """

    def __init__(self) -> None:
        self._said: set[tuple[str, str]] = set()
        self._draws: dict[str, Any] = {}
        """Random numbers by function, if they differ from the run's."""
        self._is_open = False

    def around(
        self, caller: str, *, elsewhere: bool = False
    ) -> contextlib.AbstractContextManager[None]:
        """Restores state that the block changes, and warns once for each function and kind.

        A process that the block forks ends when it leaves the block, while its parent goes on with
        the run. A block within another, whose functions run at the same time, leaves state that
        functions may change temporarily to the outer block.

        **Arguments:**

        - `caller`: the name of the called function, for messages.
        - `elsewhere`: whether other processes call the function, which share only the standard
          descriptors with this process.
        """
        return _Guarded(self, caller, elsewhere)

    def _say(self, caller: str, changed: Sequence[str], lost: Sequence[str]) -> None:
        """Warns of changes, except for random numbers, which functions may draw."""
        new = [x for x in changed if x != _DRAWS and (caller, x) not in self._said]
        for kinds, what in ((set(new) - set(lost), "undid"), (lost, "could not undo")):
            if said := [x for x in new if x in kinds]:
                warn(f"{caller} changed {listed(said)}: the run {what} that")
        self._said |= {(caller, name) for name in new}


class _Guarded(contextlib.AbstractContextManager[None]):
    """State before a call. Not a generator, which would resume through a name that may change."""

    def __init__(self, state: StateGuard, caller: str, elsewhere: bool):
        self._state, self._caller, self._elsewhere = state, caller, elsewhere

    def __enter__(self) -> None:
        self._process, self._descriptors = getpid(), Descriptors()
        self._is_inner, self._state._is_open = self._state._is_open, True
        mappings = [] if self._is_inner or self._elsewhere else _NAMES
        self._names = [(names, names.copy()) for names in mappings]
        kinds = (
            [] if self._elsewhere else [x for x in _KINDS if not (self._is_inner and x in _OF_ALL)]
        )
        self._before = {name: state for name in kinds if (state := _read(name)) is not None}
        if _DRAWS in kinds and self._caller in self._state._draws:
            _restore(_DRAWS, self._state._draws[self._caller])

    def __exit__(self, *_: object) -> None:
        said = []
        for names, before in self._names:
            for name, value in before.items():  # first of all, without calling any of them
                if names.get(name) is not value:
                    said, names[name] = ["names of Python's own"], value
        if getpid() != self._process:  # in a process that the function forked
            _exit(0)
        self._state._is_open = self._is_inner
        said += ["the standard descriptors"] * self._descriptors.restore()
        self._descriptors.close()
        now = {name: _read(name) for name in self._before}
        changed = [
            name for name, state in self._before.items() if not _is_unchanged(state, now[name])
        ]
        if _DRAWS in changed:
            self._state._draws[self._caller] = now[_DRAWS]
        elif _DRAWS in now:
            self._state._draws.pop(self._caller, None)
        lost = [name for name in changed if not _restore(name, self._before[name])]
        self._state._say(self._caller, said + changed, lost)


def _is_unchanged(before: Any, now: Any) -> bool:
    """Returns whether a state is unchanged, except for entries added to a mapping or list."""
    if isinstance(before, dict) and isinstance(now, dict):
        return all(now.get(key) == value for key, value in before.items())
    if isinstance(before, list) and isinstance(now, list):
        rest = iter(now)
        return all(each in rest for each in before)  # in this order
    return bool(before == now)


def _read(name: str) -> Any:
    """Returns the state of a kind; `None` if it cannot be read, as for a removed folder."""
    try:
        return _KINDS[name].read()
    except Exception:  # from the operating system, or from the user's stream
        return None


def _restore(name: str, before: Any) -> bool:
    """Restores the state of a kind; returns whether this succeeded."""
    try:
        _KINDS[name].restore(before)
    except Exception:  # of any class, from the operating system or JAX
        return False
    return True


def warn(text: str) -> None:
    """Prints a warning, unless standard error is closed."""
    with contextlib.suppress(OSError, ValueError):
        print_clean(f"warning: {text}", file=sys.stderr)
