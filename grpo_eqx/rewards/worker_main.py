"""A process that calls reward functions for a run.

It runs as a script, and loads two files of this package without the package, which would bring JAX
along: a worker is small, starts soon, and touches no accelerator.
"""

import importlib.util
import json
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

_LONGEST_TRACEBACK = 20_000


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
    _load("grpo_eqx.errors")  # which the other imports
    contract = _load("grpo_eqx.rewards.contract")
    del sys.modules["grpo_eqx.errors"], sys.modules["grpo_eqx.rewards.contract"]


def main(fd: int) -> None:
    """Serves calls that come through a pipe until it is closed."""
    os.set_inheritable(fd, False)
    connection: Connection[Any, Any] = Connection(fd)
    setup = connection.recv()
    sys.path[:] = setup["path"]
    try:
        funcs = {name: pickle.loads(func) for name, func in setup["funcs"].items()}
    except Exception as error:
        _reply(connection, cannot_load=f"{type(error).__name__}: {error}")
        return
    _reply(connection, ready=True)
    while True:
        try:
            name, index, arguments = connection.recv()
        except EOFError:
            return
        _reply(connection, **_called(funcs[name], arguments, index))


def _called(func: Callable[..., Any], arguments: Mapping[str, Any], index: int) -> dict[str, Any]:
    try:
        return {"rewards": contract.read_rewards(func(**arguments), 1, first=index)}
    except contract.BrokenContractError as error:
        return {"broken": str(error)}
    except BaseException as error:  # among them sys.exit, of which the process would end
        said = "".join(traceback.format_exception(error))
        return {"raised": contract.reason_of(error), "traceback": said[-_LONGEST_TRACEBACK:]}


def _reply(connection: "Connection[Any, Any]", **reply: Any) -> None:
    connection.send_bytes(json.dumps(reply).encode())


if __name__ == "__main__":
    main(int(sys.argv[1]))
