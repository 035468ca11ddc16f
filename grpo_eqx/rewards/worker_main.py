"""Worker process that calls reward functions or tools for a run.

Its guardian loads this file, which loads more files of this package without the package, because
the package would import JAX. So a worker is small, starts soon, and touches no accelerator. It
imports by name all functions that it calls after a reward function, because reward functions may
replace attributes of modules; and it puts back what would change later calls.
"""

import builtins
import faulthandler
import importlib.util
import os
import resource
import shutil
import subprocess
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

_LONGEST_TRACEBACK = 20_000
_FILES = (
    "grpo_eqx.common.clean_text",
    "grpo_eqx.common.errors",
    "grpo_eqx.common.standard_streams",
    "grpo_eqx.rewards.contract",
)
"""Files of this package that workers load, in the order of their imports."""
_cancel_dump = faulthandler.cancel_dump_traceback_later
_NAMES = [(vars(x), vars(x).copy()) for x in (builtins, os, shutil, subprocess)]
"""Names of modules that functions may replace, and their values before."""
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
    from grpo_eqx.common import standard_streams
    from grpo_eqx.rewards import contract
else:
    *_, standard_streams, contract = [_load(name) for name in _FILES]
    for name in _FILES:
        del sys.modules[name]
_STREAMS, _DESCRIPTORS = standard_streams.streams(), standard_streams.Descriptors()


def main(descriptor: int) -> None:
    """Serves calls from a socket until it is closed."""
    calls = standard_streams.copied(descriptor)
    os.close(descriptor)
    try:
        token, setup = _received(calls)
        funcs, reply = _loaded(setup)
        reader = getattr(contract, setup["reader"])
        while True:
            _send(calls, token, reply)
            token, name, index, arguments = _received(calls)
            reply = _called(funcs[name], partial(reader, index), arguments)
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


def _called(
    func: Callable[..., Any], reader: Callable[[Any], Any], arguments: Mapping[str, bytes]
) -> dict[str, Any]:
    """Calls a function, and reads what it has returned; returns the reply."""
    values = {}
    for column, value in arguments.items():
        try:
            values[column] = _theirs(partial(loads, value))
        except BaseException as error:
            return {"unreadable": column, "reason": contract.reason_of(error)}
    try:
        returned = _theirs(partial(func, **values))
        return {"returned": _theirs(partial(reader, returned))}
    except BaseException as error:  # also SystemExit, which would end the process
        return {
            "raised": contract.reason_of(error),
            "text": contract.text_of(error),
            "traceback": _traceback_of(error),
        }


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
    """Restores state that would change the worker's replies and later calls, or end it later."""
    for names, own in _NAMES:
        names.update(own)
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
    _DESCRIPTORS.restore()
    for name, stream in _STREAMS.items():
        standard_streams.restore_stream(name, stream)


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
