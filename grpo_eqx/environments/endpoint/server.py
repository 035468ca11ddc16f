"""A server of the endpoint, in a thread of its own."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from ipaddress import ip_address

import uvicorn

from grpo_eqx.common.errors import UserError, first_line
from grpo_eqx.environments.endpoint.app import Endpoint

_MOST_WAITING = 2048
"""Connections that wait to be accepted."""
_IDLE = 300
"""Seconds after which a connection without requests is closed. Agents that wait for a tool should
not send their next request just when theirs is."""
_TO_END = 10.0
"""Seconds after which the server's thread is left to itself."""


def listening(host: str, port: int, setting: str) -> socket.socket:
    """Returns a socket that listens; connections wait until it is served.

    **Arguments:**

    - `host`, `port`: where it listens; port 0 is any that is free.
    - `setting`: name of the port's setting, for messages.

    Raises `UserError` if it cannot listen there.
    """
    with contextlib.ExitStack() as stack:
        try:
            kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            listener = stack.enter_context(socket.socket(kind, socket.SOCK_STREAM))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(_MOST_WAITING)
        except (OSError, OverflowError) as error:
            raise UserError(
                f"cannot listen at {host} port {port} ({first_line(error)}): use another "
                f"{setting}, or 0 for any that is free."
            ) from error
        stack.pop_all()
        return listener


@contextlib.contextmanager
def served(endpoint: Endpoint, listener: socket.socket) -> Iterator[str]:
    """Serves an endpoint within the block, and yields its address, as in `http://127.0.0.1:8000`.

    **Arguments:**

    - `endpoint`: the endpoint.
    - `listener`: the socket where it listens, which is closed with the block.
    """
    with listener:
        config = uvicorn.Config(
            endpoint.app, log_level="error", access_log=False, lifespan="off",
            timeout_graceful_shutdown=2, timeout_keep_alive=_IDLE,
            log_config=None,  # which would close the handlers of the program's own logs
        )  # fmt: skip
        server = uvicorn.Server(config)
        thread = threading.Thread(
            target=server.run, args=([listener],), daemon=True, name="endpoint"
        )
        thread.start()
        try:
            host, port, *_ = listener.getsockname()
            name = f"[{host}]" if ":" in host else host
            yield f"http://{name}:{port}"
        finally:
            server.should_exit = True
            thread.join(_TO_END)


def is_loopback(host: str) -> bool:
    """Returns whether only this machine reaches an address."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
