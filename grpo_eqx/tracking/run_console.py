"""Consoles that commands and runs print on: what is from outside cannot steer a terminal."""

import contextlib
from collections.abc import Iterator
from typing import Any

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook
from rich.control import Control
from rich.segment import Segment

from grpo_eqx.common.clean_text import clean
from grpo_eqx.common.errors import EXIT_PIPE_CLOSED


def safe_console(**options: Any) -> Console:
    """Returns a console that spells out what cannot be printed, and reads no markup in texts.

    What other render hooks add to it, such as live lines, they clean themselves.

    **Arguments:** those of rich's `Console`.
    """
    console = _RunConsole(markup=False, emoji=False, **options)
    console.push_render_hook(_Cleaning())
    return console


class _RunConsole(Console):
    """Console of a run, which ends as a process does whose output nobody reads any more."""

    def on_broken_pipe(self) -> None:
        with contextlib.suppress(SystemExit):  # rich's own, with another exit code
            Console.on_broken_pipe(self)
        raise SystemExit(EXIT_PIPE_CLOSED)


class _Cleaning(RenderHook):
    """Cleans all text that a console prints."""

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [x if isinstance(x, Control) else _Cleaned(x) for x in renderables]


class _Cleaned:
    """Something to print, of which each piece of text is cleaned."""

    def __init__(self, inner: ConsoleRenderable):
        self._inner = inner

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for text, style, control in console.render(self._inner, options):
            yield Segment(text if control else clean(text, console.encoding), style, control)
