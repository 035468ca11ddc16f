"""A process that calls reward functions for a run.

Its guardian loads it as a file, and it loads more files of this package without the package,
which would bring JAX along: a worker is small, starts soon, and touches no accelerator. What it
calls after a function it has by names of its own, whatever the function puts into their modules.
"""

import contextlib
import fcntl
import importlib.util
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from json import dumps
from os import _exit, getpid, read, write
from pathlib import Path
from pickle import loads
from types import ModuleType
from typing import TYPE_CHECKING, Any

_OUT_OF_THE_WAY = 500
"""Least number of the worker's descriptor, above those that functions use by guess."""
_LONGEST_TRACEBACK = 20_000
_FILES = "grpo_eqx.clean_text", "grpo_eqx.errors", "grpo_eqx.rewards.contract"
"""Files of this package that workers load, each after those that it imports."""
NO_REPLY = 74
"""Exit code of a worker whose function has closed its descriptor."""


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
    """Serves calls that come through a socket until it is closed."""
    calls = descriptor
    with contextlib.suppress(OSError):  # so many may not be open
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
        _exit(NO_REPLY)


def _loaded(setup: Mapping[str, Any]) -> tuple[dict[str, Callable[..., Any]], dict[str, Any]]:
    """Returns the functions, and the reply that they are there, or why they are not."""
    sys.path[:] = setup["path"]
    try:
        return {name: loads(func) for name, func in setup["funcs"].items()}, {}
    except BaseException as error:
        return {}, {"cannot_load": contract.reason_of(error)}


def _called(func: Callable[..., Any], index: int, arguments: Mapping[str, bytes]) -> dict[str, Any]:
    """Calls a function for completion `index`; returns the reply. A process that it forks ends."""
    worker, values = getpid(), {}
    for column, value in arguments.items():
        try:
            values[column] = loads(value)
        except BaseException as error:
            return {"unreadable": column, "reason": contract.reason_of(error)}
    try:
        return {"rewards": contract.read_rewards(func(**values), 1, first=index)}
    except contract.BrokenContractError as error:
        return {"broken": str(error)}
    except BaseException as error:  # among them sys.exit, of which the process would end
        return {"raised": contract.reason_of(error), "traceback": _traceback_of(error)}
    finally:
        if getpid() != worker:
            _exit(0)
        signal.setitimer(signal.ITIMER_REAL, 0)  # which would end the next call


def _traceback_of(error: BaseException) -> str:
    try:
        said = "".join(traceback.format_exception(error))
    except BaseException:  # its class may raise whatever it is asked
        return contract.reason_of(error)
    return said[-_LONGEST_TRACEBACK:]


def _received(calls: int) -> Any:
    """Returns what the run sends next; ends the process where the run has gone."""
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
    """Sends a reply behind the token of its call, so that nothing else is taken for it."""
    body = dumps(reply).encode()
    left = memoryview(token + len(body).to_bytes(4, "big") + body)
    while left:
        left = left[write(calls, left) :]
