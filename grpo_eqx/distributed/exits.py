"""Exits that end a process at once, even while threads are busy or hang."""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import NoReturn

_last_acts: list[Callable[[], None]] = []


@contextlib.contextmanager
def last_act(act: Callable[[], None]) -> Iterator[None]:
    """Makes an exit call `act` first, while the context is entered.

    `act` must take no locks: the thread that holds them may hang.
    """
    _last_acts.append(act)
    try:
        yield
    finally:
        _last_acts.remove(act)


def do_last_acts() -> None:
    """Calls each last act once, so that messages of the exit can follow."""
    while _last_acts:
        with contextlib.suppress(Exception):  # the exit is what matters
            _last_acts.pop()()


def exit_at_once(code: int) -> NoReturn:
    """Ends the process, after the last acts."""
    do_last_acts()
    os._exit(code)
