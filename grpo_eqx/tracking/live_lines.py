"""Lines at the bottom of a terminal that are redrawn in place."""

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook
from rich.control import Control
from rich.file_proxy import FileProxy
from rich.segment import ControlType, Segment
from rich.text import Text

from grpo_eqx.distributed.exits import last_act

_Drawn = Iterator[Segment | Control]
_REFRESH_S = 1.0
_TO_LINE_END = Segment("\x1b[K", None, [(ControlType.ERASE_IN_LINE, 0)])
_TO_SCREEN_END = Segment("\x1b[J", None, [(ControlType.CLEAR,)])
_TO_LINE_START = Control((ControlType.CARRIAGE_RETURN,))
_CLEAN = b"\r\x1b[J\x1b[?25h"
"""Erases the lines and shows the cursor."""


class LiveLines(RenderHook):
    """Lines below everything that is printed, redrawn every second and whenever text is printed.

    The cursor rests, hidden, on an empty line above them. Erasing everything below the cursor thus
    works even after the terminal has wrapped lines at a new width. And a line that a library writes
    straight to the terminal, past Python, stays legible.

    While the context is entered, output to standard output and standard error, and from `logging`
    handlers that write there, is printed above the lines, if these streams are terminals.
    """

    def __init__(self, console: Console, lines: Callable[[int], Sequence[Text]]):
        """**Arguments:**

        - `console`: the console of a terminal.
        - `lines`: returns the lines for a width in columns.
        """
        self._console, self._lines = console, lines
        self._lock, self._is_over = threading.RLock(), threading.Event()
        self._entered = contextlib.ExitStack()

    def __enter__(self) -> "LiveLines":
        with contextlib.ExitStack() as entered:
            entered.enter_context(last_act(self._clean_up))
            entered.enter_context(_redirected(self._console))
            self._console.show_cursor(False)
            self._console.push_render_hook(self)
            self._entered = entered.pop_all()
        self._is_over.clear()
        self.refresh()
        threading.Thread(target=self._keep_refreshing, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leaves the last lines on the terminal, with the cursor below them."""
        with self._lock:
            self._is_over.set()
        self._console.pop_render_hook()
        with contextlib.suppress(OSError), self._entered, self._console:
            self._console.print(_Erasing(), end="")
            for line in self._drawn():
                self._console.print(line, no_wrap=True, overflow="ellipsis", highlight=False)
            self._console.show_cursor(True)

    def refresh(self) -> None:
        """Redraws the lines, unless the terminal is gone, which is no reason to end a run."""
        with self._lock, contextlib.suppress(OSError):
            if not self._is_over.is_set():
                self._console.print(Control())

    @property
    def width(self) -> int:
        """Columns of the terminal."""
        return self._room()[0]

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """Adds the lines below the text that is printed."""
        printed = any(not isinstance(x, Control) for x in renderables)
        erasing = [_Erasing()] if printed else []
        return [*erasing, *renderables, _Drawing(self._drawn(), self._room()[0] - 1)]

    def _drawn(self) -> list[Text]:
        """Returns the lines, after an empty one, as far as the terminal has room for them."""
        width, height = self._room()
        # Text in the last column would leave the cursor there.
        return [Text(), *self._lines(width - 1)][: max(1, height - 1)]

    def _room(self) -> tuple[int, int]:
        """Returns the columns and rows to use.

        The console takes its size from the variables `COLUMNS` and `LINES` if they are set, and
        then misses changes of the terminal's size.
        """
        width, height = self._console.size
        with contextlib.suppress(OSError, ValueError):  # no terminal, or no file
            real = os.get_terminal_size(self._console.file.fileno())
            width, height = min(width, real.columns), min(height, real.lines)
        return width, height

    def _keep_refreshing(self) -> None:
        while not self._is_over.wait(_REFRESH_S):
            self.refresh()

    def _clean_up(self) -> None:
        os.write(self._console.file.fileno(), _CLEAN)


class _Erasing:
    """Erases everything below the cursor."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> _Drawn:
        yield _TO_LINE_START
        yield _TO_SCREEN_END


class _Drawing:
    """Draws lines over the terminal's present text, and returns the cursor to the first line."""

    def __init__(self, lines: Sequence[Text], width: int):
        self._of, self._width = lines, width

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> _Drawn:
        fitting = options.update(width=self._width, no_wrap=True, overflow="ellipsis")
        yield _TO_LINE_START
        for number, line in enumerate(self._of):
            if number > 0:
                yield Segment.line()
            yield from console.render_lines(line, fitting, pad=False)[0]
            yield _TO_LINE_END
        yield _TO_SCREEN_END
        yield _TO_LINE_START
        if len(self._of) > 1:
            yield Control((ControlType.CURSOR_UP, len(self._of) - 1))


@contextlib.contextmanager
def _redirected(console: Console) -> Iterator[None]:
    """Prints on a console all that is written to the standard streams that are terminals."""
    before = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    proxies: dict[str, Any] = {
        name: FileProxy(console, stream) for name, stream in before.items() if stream.isatty()
    }
    moved = [
        (handler, name)
        for handler in _stream_handlers()
        for name in proxies
        if handler.stream is before[name]
    ]
    for handler, name in moved:
        handler.setStream(proxies[name])
    for name, proxy in proxies.items():
        setattr(sys, name, proxy)
    try:
        yield
    finally:
        for name in proxies:
            setattr(sys, name, before[name])
        for handler, name in moved:
            handler.setStream(before[name])


def _stream_handlers() -> list["logging.StreamHandler[IO[str]]"]:
    """Returns the handlers that hold a stream; others look up `sys.stderr` at each message."""
    known = [logging.root, *logging.root.manager.loggerDict.values()]
    loggers = [each for each in known if isinstance(each, logging.Logger)]
    handlers = {handler for each in loggers for handler in each.handlers}
    streams = [each for each in handlers if isinstance(each, logging.StreamHandler)]
    return [each for each in streams if "stream" in vars(each)]
