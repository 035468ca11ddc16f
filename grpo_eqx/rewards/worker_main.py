"""Worker process that calls reward functions for a run.

Its guardian loads this file, which loads more files of this package without the package, because
the package would import JAX. So a worker is small, starts soon, and touches no accelerator. It
imports by name all functions that it calls after a reward function, because reward functions may
replace attributes of modules; and it restores the built-in names.
"""

import builtins
import faulthandler
import fcntl
import importlib.util
import os
import resource
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from os import _exit, getpid, read, write
from pathlib import Path
from pickle import loads
from resource import getrlimit, setrlimit
from signal import ITIMER_PROF, ITIMER_REAL, ITIMER_VIRTUAL, setitimer
from sys import getrecursionlimit, gettrace, setprofile, setrecursionlimit, settrace
from traceback import format_exception
from types import ModuleType
from typing import TYPE_CHECKING, Any

_OUT_OF_THE_WAY = 500
"""Least number of the worker's descriptor, above numbers that functions may guess."""
_LONGEST_TRACEBACK = 20_000
_FILES = "grpo_eqx.common.clean_text", "grpo_eqx.common.errors", "grpo_eqx.rewards.contract"
"""Files of this package that workers load, in the order of their imports."""
_cancel_dump = faulthandler.cancel_dump_traceback_later
_NAMES = vars(builtins)
_OWN_NAMES = _NAMES.copy()
_TRACE, _RECURSION = gettrace(), getrecursionlimit()
_LIMITS = {x: getrlimit(x) for name, x in vars(resource).items() if name.startswith("RLIMIT_")}
"""Limits on resources, updated once functions are loaded, as their modules may set limits."""


def _load(name: str) -> ModuleType:
    """Loads a file of this package by its name there, without the package."""
    parts = name.split(".")[1:]
    path = Path(__file__).parents[1].joinpath(*parts).with_suffix(".py")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if TYPE_CHECKING:
    from grpo_eqx.rewards import contract
else:
    for name in _FILES:
        contract = _load(name)
    for name in _FILES:
        del sys.modules[name]


def main(descriptor: int) -> None:
    """Serves calls from a socket until it is closed."""
    calls = descriptor
    with suppress(OSError):  # so high a number may not be allowed
        calls = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _OUT_OF_THE_WAY)
        os.close(descriptor)
    os.set_inheritable(calls, False)
    try:
        token, setup = _received(calls)
        funcs, reply = _loaded(setup)
        while True:
            _send(calls, token, reply)
            token, name, index, arguments = _received(calls)
            reply = _called(funcs[name], index, arguments)
    except OSError:
        _exit(contract.NO_REPLY)
    except MemoryError:  # because of a limit that a function has set
        _exit(1)


def _loaded(setup: Mapping[str, Any]) -> tuple[dict[str, Callable[..., Any]], dict[str, Any]]:
    """Returns the functions, and the reply, which has the reason if they cannot be loaded."""
    sys.path[:] = setup["path"]

    def load() -> dict[str, Callable[..., Any]]:
        funcs = {name: loads(func) for name, func in setup["funcs"].items()}
        _LIMITS.update({limit: getrlimit(limit) for limit in _LIMITS})
        return funcs

    try:
        return _theirs(load), {}
    except BaseException as error:
        return {}, {"cannot_load": contract.reason_of(error)}


def _called(func: Callable[..., Any], index: int, arguments: Mapping[str, bytes]) -> dict[str, Any]:
    """Calls a function for completion `index`; returns the reply."""
    values = {}
    for column, value in arguments.items():
        try:
            values[column] = _theirs(partial(loads, value))
        except BaseException as error:
            return {"unreadable": column, "reason": contract.reason_of(error)}
    try:
        returned = _theirs(partial(func, **values))
        return {"rewards": _theirs(partial(contract.read_rewards, returned, 1, first=index))}
    except BaseException as error:  # also SystemExit, which would end the process
        return {"raised": contract.reason_of(error), "traceback": _traceback_of(error)}


def _theirs(call: Callable[[], Any]) -> Any:
    """Calls the user's code; a process that the code forks ends after it."""
    worker = getpid()
    try:
        return call()
    finally:
        for _ in ("trace", "profile", "neither"):
            try:
                _put_back()
                break
            except BaseException:  # from a function that still traces calls
                continue
        if getpid() != worker:
            _exit(0)


def _put_back() -> None:
    """Restores state that would change how the worker reads and replies, or end it later."""
    _NAMES.update(_OWN_NAMES)
    settrace(_TRACE)
    setprofile(None)
    setrecursionlimit(max(_RECURSION, getrecursionlimit()))
    for timer in (ITIMER_REAL, ITIMER_VIRTUAL, ITIMER_PROF):
        setitimer(timer, 0)
    _cancel_dump()
    for limit, before in _LIMITS.items():
        if getrlimit(limit) != before:
            with suppress(ValueError):  # the function has lowered the hard limit
                setrlimit(limit, before)


def _traceback_of(error: BaseException) -> str:
    try:
        said = "".join(format_exception(error))
    except BaseException:  # its class may raise errors, too
        return contract.reason_of(error)
    return said[-_LONGEST_TRACEBACK:]


def _received(calls: int) -> Any:
    """Returns the next message of the run; ends the process if the run has ended."""
    length = int.from_bytes(_read(calls, 8), "big")
    return loads(_read(calls, length))


def _read(calls: int, length: int) -> bytes:
    whole = bytearray()
    while len(whole) < length:
        part = read(calls, min(length - len(whole), 1 << 20))
        if not part:
            _exit(0)
        whole += part
    return bytes(whole)


def _send(calls: int, token: bytes, reply: Mapping[str, Any]) -> None:
    """Sends a reply after the token of its call, so that nothing else is mistaken for a reply."""
    body = ascii(reply).encode()
    left = memoryview(token + len(body).to_bytes(4, "big") + body)
    while left:
        left = left[write(calls, left) :]
