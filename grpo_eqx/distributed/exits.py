"""Exits that end a process at once, whatever its threads are doing."""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import NoReturn

_last_acts: list[Callable[[], None]] = []


@contextlib.contextmanager
def last_act(act: Callable[[], None]) -> Iterator[None]:
    """Has such an exit call `act` while the context is entered.

    It must take no locks: whoever holds them may be what hangs.
    """
    _last_acts.append(act)
    try:
        yield
    finally:
        _last_acts.remove(act)


def do_last_acts() -> None:
    """Calls them, so that messages of the exit can follow; each is called once."""
    while _last_acts:
        with contextlib.suppress(Exception):  # the exit is what matters
            _last_acts.pop()()


def exit_at_once(code: int) -> NoReturn:
    """Ends the process, after the last acts."""
    do_last_acts()
    os._exit(code)
