"""Connections to a port that anybody can reach, served side by side."""

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
"""Connections whose message has not come yet. Above this number the oldest is closed."""
_CHUNK = 2**16


class Caller(Generic[Message]):
    """Connection to the port."""

    def __init__(self, connection: socket.socket):
        connection.setblocking(False)
        self.connection = connection
        self.deadline = time.monotonic() + _MESSAGE_SECONDS
        self.received = bytearray()
        self.message: Message | None = None
        """Its message; `None` until that has come."""

    def send(self, line: bytes) -> None:
        """Sends a line, which is short, to a caller that may be gone."""
        with contextlib.suppress(OSError):
            self.connection.sendall(line + b"\n")


class Callers(Generic[Message]):
    """Connections to a port, each of which has a few seconds to send one line.

    One that is silent, drips, floods or says anything else is closed, and delays no other.
    """

    def __init__(
        self,
        server: socket.socket,
        understood: Callable[[bytes], Message | None],
        welcome: Callable[[Caller[Message]], None],
    ):
        """**Arguments:** the listening socket; parses a line, `None` for one that is no message;
        called with each caller whose message has come.
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
        """Messages of all callers that are still connected, in the order in which they called."""
        return [caller.message for caller in self._callers if caller.message is not None]

    def serve(self, seconds: float) -> None:
        """Serves whatever happens next, of which there may be nothing for so many seconds."""
        ready = self._selector.select(min(seconds, self._next_deadline() - time.monotonic()))
        for key, _ in ready:
            if key.data is None:
                self._accept()
            elif key.data in self._callers:  # else it was closed for another
                self._receive(key.data)
        for caller in self._silent():
            if caller.deadline <= time.monotonic():
                self._drop(caller)

    def tell(self, line: Callable[[Message], bytes], seconds: float) -> None:
        """Sends a last line to each caller with a message, and waits until these hang up.

        **Arguments:** the line for a message; the seconds to wait at most.
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
        except OSError:  # gone again, or this process has no more descriptors
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

    Raises `RunError` where another program has the port, which it may leave, and `UserError` where
    this process may not have it.
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
    """Returns the error of process 0 whose port another program has."""
    return RunError(
        f"process 0 cannot listen on port {port} ({reason}): another run may be using it, so wait "
        f"until that run ends, or choose another port for all processes."
    )
