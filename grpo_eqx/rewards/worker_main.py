"""A process that calls reward functions for a run.

It runs as a script and imports nothing of this package, which would bring JAX along: a worker is
small, starts soon, and touches no accelerator.
"""

import json
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any


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
            name, arguments = connection.recv()
        except EOFError:
            return
        _reply(connection, **_called(funcs[name], arguments))


def _called(func: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    try:
        returned = func(**arguments)
        if isinstance(returned, str) or not (
            isinstance(returned, Sequence) or type(returned).__name__ == "ndarray"
        ):
            return {"no_list": repr(returned)}
        return {"returned": [_plain(reward) for reward in returned]}
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        said = (str(error).strip() or "no reason given").splitlines()[0]
        where = f"{os.path.basename(frame.filename)}, line {frame.lineno}"
        reason = f"raised {type(error).__name__}: {said} ({where})"
        return {"raised": reason, "traceback": traceback.format_exc()}


def _plain(reward: Any) -> float | str | None:
    """Returns a reward as JSON can hold it; a text stands for what is no number."""
    if reward is None:
        return None
    try:
        return float(reward)
    except (TypeError, ValueError):
        return str(reward)


def _reply(connection: "Connection[Any, Any]", **reply: Any) -> None:
    connection.send_bytes(json.dumps(reply).encode())


if __name__ == "__main__":
    main(int(sys.argv[1]))
