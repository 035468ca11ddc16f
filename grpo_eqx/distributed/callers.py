"""Connections to an open port, served side by side."""

import contextlib
import os
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from grpo_eqx.common.errors import RunError, UserError

Message = TypeVar("Message")

_MESSAGE_SECONDS = 5.0
"""Time that a connection has to send its message."""
_LONGEST_MESSAGE = 2**20
_MOST_CALLERS = 256
"""Most connections whose message has not arrived. Beyond this number, the oldest is closed."""
_CHUNK = 2**16


class Caller(Generic[Message]):
    """Connection to the port."""

    def __init__(self, connection: socket.socket):
        connection.setblocking(False)
        self.connection = connection
        self.deadline = time.monotonic() + _MESSAGE_SECONDS
        self.received = bytearray()
        self.message: Message | None = None
        """The message, once it has arrived."""

    def send(self, line: bytes) -> None:
        """Sends a short line to a caller, which may be gone."""
        with contextlib.suppress(OSError):
            self.connection.sendall(line + b"\n")


class Callers(Generic[Message]):
    """Connections to a port, each of which has a few seconds to send a message of one line.

    A connection that sends nothing, or too slowly, or too much, or anything but a message, is
    closed. It delays no other.
    """

    def __init__(
        self,
        server: socket.socket,
        understood: Callable[[bytes], Message | None],
        welcome: Callable[[Caller[Message]], None],
    ):
        """**Arguments:**

        - `server`: the listening socket.
        - `understood`: parses a line; returns `None` for a line that is not a message.
        - `welcome`: called with each caller whose message has arrived.
        """
        self._server = server
        self._understood = understood
        self._welcome = welcome
        self._callers: list[Caller[Message]] = []
        self._selector = selectors.DefaultSelector()
        server.setblocking(False)
        self._selector.register(server, selectors.EVENT_READ)

    def __enter__(self) -> "Callers[Message]":
        return self

    def __exit__(self, *_: object) -> None:
        for caller in list(self._callers):
            self._drop(caller)
        self._selector.close()

    @property
    def messages(self) -> list[Message]:
        """Messages of all callers that are still connected, in the order of their calls."""
        return [caller.message for caller in self._callers if caller.message is not None]

    def serve(self, seconds: float) -> None:
        """Serves the next events, for which it waits `seconds` at most."""
        ready = self._selector.select(min(seconds, self._next_deadline() - time.monotonic()))
        for key, _ in ready:
            if key.data is None:
                self._accept()
            elif key.data in self._callers:  # not closed in favor of another
                self._receive(key.data)
        for caller in self._silent():
            if caller.deadline <= time.monotonic():
                self._drop(caller)

    def tell(self, line: Callable[[Message], bytes], seconds: float) -> None:
        """Sends a last line to each caller with a message, and waits until all of them hang up.

        **Arguments:**

        - `line`: returns the line that answers a message.
        - `seconds`: the longest wait.
        """
        self._selector.unregister(self._server)
        for caller in self._callers:
            if caller.message is not None:
                caller.send(line(caller.message))
        end = time.monotonic() + seconds
        while self.messages and (left := end - time.monotonic()) > 0:
            self.serve(left)

    def _silent(self) -> list[Caller[Message]]:
        return [caller for caller in self._callers if caller.message is None]

    def _next_deadline(self) -> float:
        return min((caller.deadline for caller in self._silent()), default=float("inf"))

    def _accept(self) -> None:
        silent = self._silent()
        if len(silent) >= _MOST_CALLERS:
            self._drop(silent[0])
        try:
            connection, _ = self._server.accept()
        except OSError:  # the caller is gone, or no more descriptors are free
            if silent:
                self._drop(silent[0])
            return
        caller = Caller[Message](connection)
        self._callers.append(caller)
        self._selector.register(connection, selectors.EVENT_READ, caller)

    def _receive(self, caller: Caller[Message]) -> None:
        try:
            chunk = caller.connection.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        caller.received += chunk
        # A message is one line and nothing more. After it, a caller may only hang up.
        line, end, rest = bytes(caller.received).partition(b"\n")
        if end and not rest and caller.message is None:
            caller.message = self._understood(line)
            caller.received.clear()
            if caller.message is not None:
                self._welcome(caller)
                return
        if end or not chunk or caller.message is not None or len(line) > _LONGEST_MESSAGE:
            self._drop(caller)

    def _drop(self, caller: Caller[Message]) -> None:
        self._callers.remove(caller)
        self._selector.unregister(caller.connection)
        caller.connection.close()


@contextlib.contextmanager
def listening(port: int) -> Iterator[socket.socket]:
    """Listens on a port of all addresses.

    Raises `RunError` if another program uses the port, which it may give up, and `UserError` if
    this process is not allowed to use it.
    """
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        server = socket.create_server(("", port), family=family, dualstack_ipv6=both)
    except PermissionError as error:
        raise UserError(
            f"process 0 cannot listen on port {port} ({os.strerror(error.errno or 0)}): choose a "
            f"port above 1023."
        ) from error
    except OSError as error:
        raise taken_port(port, os.strerror(error.errno or 0)) from error
    with server:
        yield server


def taken_port(port: int | str, reason: str) -> RunError:
    """Returns the error of process 0 for a port that another program uses."""
    return RunError(
        f"process 0 cannot listen on port {port} ({reason}): another run may be using it, so wait "
        f"until that run ends, or choose another port for all processes."
    )
