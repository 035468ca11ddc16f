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
from bdb import Bdb
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

from grpo_eqx.common.clean_text import print_clean
from grpo_eqx.common.errors import listed

_NAMES: Final = [vars(module) for module in (builtins, os, shutil, subprocess)]
"""Names of Python's own that the run needs, and that guards around the code of a model replace."""
_DEBUGGERS: Final = "pydevd", "coverage"
"""Beginnings of the names of modules that trace calls for a debugger, beside Python's own."""
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
            if now.get(key) != value:
                restore(key, value)

    return _Kind(read, restore_all)


def _file_mode() -> int | None:
    """Returns the mask of new files' modes; `None` where it cannot be read without setting it."""
    with contextlib.suppress(OSError), open("/proc/self/status", errors="replace") as status:
        for line in status:
            if line.startswith("Umask:"):
                return int(line[6:], 8)
    return None


def _set_path(before: list[str]) -> None:
    sys.path[:] = [*before, *(each for each in sys.path if each not in before)]


def _tracing() -> dict[Callable[[Any], None], Any]:
    """Returns what traces and profiles calls, by what sets it, but for debuggers."""
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
    streams = {name: getattr(sys, name, None) for name in _STREAMS}
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
    _DRAWS: _Kind(_draws, _set_draws),
    "the environment": _each(lambda: dict(environ), environ.__setitem__),
    "the path of modules": _Kind(lambda: list(sys.path), _set_path),
}
"""Kinds of state, by their names in messages. What is added to a mapping or list may stay."""
_OF_ALL: Final = {"garbage collection", "the environment", "the path of modules"}
"""Kinds that functions which run at the same time may each change for a while."""


class KeptState:
    """Keeper of this process's state around calls of the user's code.

    Each caller has the global random numbers of Python and NumPy for itself: what one draws or
    seeds changes those of no other, nor the run's. What is added to the environment or to the path
    of modules stays, as a library does so once, when it is first imported.
    """

    def __init__(self) -> None:
        self._said: set[tuple[str, str]] = set()
        self._draws: dict[str, Any] = {}
        """Random numbers by caller, where these differ from the run's."""
        self._is_open = False

    def around(
        self, caller: str, *, elsewhere: bool = False
    ) -> contextlib.AbstractContextManager[None]:
        """Puts back what is changed inside, and says so, once for each kind of each caller.

        A process that is forked inside and comes out ends: its parent goes on with the run. Inside
        another such block, whose code runs at the same time, what code may change for a while is
        left to that.
        **Arguments:** the name of what is called, for messages; whether other processes call it,
        which have no more of this one than the files of its standard descriptors.
        """
        return _Around(self, caller, elsewhere)

    def _say(self, caller: str, changed: Sequence[str], lost: Sequence[str]) -> None:
        """Says what was changed, but for random numbers, which are there to be drawn."""
        new = [x for x in changed if x != _DRAWS and (caller, x) not in self._said]
        for kinds, what in ((set(new) - set(lost), "undid"), (lost, "could not undo")):
            if said := [x for x in new if x in kinds]:
                warn(f"{caller} changed {listed(said)}: the run {what} that")
        self._said |= {(caller, name) for name in new}


class _Around(contextlib.AbstractContextManager[None]):
    """State before a call. A generator in its place would be woken by a name of Python's."""

    def __init__(self, state: KeptState, caller: str, elsewhere: bool):
        self._state, self._caller, self._elsewhere = state, caller, elsewhere

    def __enter__(self) -> None:
        self._process, self._descriptors = getpid(), _Descriptors()
        self._is_inner, self._state._is_open = self._state._is_open, True
        mappings = [] if self._is_inner or self._elsewhere else _NAMES
        self._names = [(names, names.copy()) for names in mappings]
        kinds = (
            [] if self._elsewhere else [x for x in _KINDS if not (self._is_inner and x in _OF_ALL)]
        )
        self._before = {name: state for name in kinds if (state := _read(name)) is not None}
        if _DRAWS in kinds and self._caller in self._state._draws:
            _restored(_DRAWS, self._state._draws[self._caller])

    def __exit__(self, *_: object) -> None:
        said = []
        for names, before in self._names:
            for name, value in before.items():  # first of all, and without a call of one of them
                if names.get(name) is not value:
                    said, names[name] = ["names of Python's own"], value
        if getpid() != self._process:
            _exit(0)
        self._state._is_open = self._is_inner
        said += ["the standard descriptors"] * self._descriptors.restore()
        now = {name: _read(name) for name in self._before}
        changed = [name for name, state in self._before.items() if not _is_kept(state, now[name])]
        if _DRAWS in changed:
            self._state._draws[self._caller] = now[_DRAWS]
        elif _DRAWS in now:
            self._state._draws.pop(self._caller, None)
        lost = [name for name in changed if not _restored(name, self._before[name])]
        self._state._say(self._caller, said + changed, lost)


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


def _is_kept(before: Any, now: Any) -> bool:
    """Returns whether a state is as before; a mapping or list may have more."""
    if isinstance(before, dict) and isinstance(now, dict):
        return all(now.get(key) == value for key, value in before.items())
    if isinstance(before, list) and isinstance(now, list):
        rest = iter(now)
        return all(each in rest for each in before)  # in this order
    return bool(before == now)


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
