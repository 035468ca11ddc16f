"""Consoles and texts of rich for what comes from outside, so that it cannot steer a terminal."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook
from rich.control import Control
from rich.segment import Segment
from rich.text import Text

from grpo_eqx.common.clean_text import clean, has, spelled
from grpo_eqx.common.errors import EXIT_PIPE_CLOSED

_ESCAPED, _CUT = "magenta", "cyan"


def safe_console(**options: Any) -> Console:
    """Returns a console that spells out what cannot be printed, and reads no markup in texts.

    Other render hooks, such as the hook of live lines, clean what they add.
    """
    console = _RunConsole(markup=False, emoji=False, **options)
    console.push_render_hook(_Cleaning())
    return console


class _RunConsole(Console):
    """Console that ends the process, with the usual exit code, once nobody reads its output."""

    def on_broken_pipe(self) -> None:
        with contextlib.suppress(SystemExit):  # from rich, with another exit code
            Console.on_broken_pipe(self)
        raise SystemExit(EXIT_PIPE_CLOSED)


class _Cleaning(RenderHook):
    """Cleans all text that a console prints."""

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [x if isinstance(x, Control) else _Cleaned(x) for x in renderables]


class _Cleaned:
    """Something to print, whose pieces of text are cleaned."""

    def __init__(self, inner: ConsoleRenderable):
        self._inner = inner

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for text, style, control in console.render(self._inner, options):
            yield Segment(text if control else clean(text, console.encoding), style, control)


def literal(text: str, *, newlines: bool = True, encoding: str = "utf-8") -> Text:
    r"""Returns a text whose unprintable characters are spelled as in Python: `\x1b`, `\u202e`.

    Spells escape sequences, and characters that turn the direction of writing. Markup of rich is
    shown as it stands.

    **Arguments:**

    - `text`: the text.
    - `newlines`: whether to keep line breaks; otherwise they are spelled `\n`.
    - `encoding`: the encoding of the output.
    """
    shown = Text()
    for char in text:
        if has(encoding, char) or (newlines and char == "\n"):
            shown.append(char)
        else:
            shown.append(spelled(char), _ESCAPED)
    return shown


def cut_in_the_middle(text: str, most: int, show: Callable[[str], Text] = Text) -> Text:
    """Returns a text of at most `most` characters: of a longer text, its start and its end.

    The number of characters left out stands in between.

    **Arguments:**

    - `text`: the text.
    - `most`: the limit, in characters.
    - `show`: makes a text safe; called only for the parts that are shown.
    """
    unread = max(0, len(text) - 2 * most)
    shown = Text.assemble(show(text[:most]), show(text[most + unread :]))
    number = len(shown) + unread
    if number <= most:
        return shown
    kept = max(2, most - len(_note(number)))
    tail = kept // 2
    return Text.assemble(
        shown[: kept - tail], (_note(number - kept), _CUT), shown[len(shown) - tail :]
    )


def _note(number: int) -> str:
    return f" ...{number:,} more... "
