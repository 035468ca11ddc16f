"""Completions on a terminal: in a table, one after the other, or side by side."""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from grpo_eqx.common.column_names import SHOWN_COLUMNS, TOKEN_COLUMNS
from grpo_eqx.tracking.safe_console import cut_in_the_middle, literal

_LINES_OF_A_CELL = 5
_FILLED = 0.85
"""Share of a cell that text fills, because lines break between words."""
_NUMBER_WIDTH = 9
_GAP = 2
_COLUMN_OF_A_STEP = 34
"""Columns of a terminal that a step needs where steps stand side by side."""
_LABEL = "dim"


def spread(values: Sequence[float], number: int) -> list[int]:
    """Returns indices of at most `number` values, from the largest to the smallest.

    The chosen values are evenly spaced in that order, both ends included, so that they show which
    shares of the values are large and small. NaN counts as smallest. Equal values keep their order.
    """
    ranked = sorted(range(len(values)), key=lambda i: _descending(values[i]))
    return [ranked[i] for i in evenly(len(ranked), number)]


def evenly(count: int, number: int) -> list[int]:
    """Returns at most `number` indices below `count`, evenly spaced, both ends included."""
    if count <= number:
        return list(range(count))
    if number == 1:
        return [0]
    return [round(i * (count - 1) / (number - 1)) for i in range(number)]


def as_table(
    columns: Mapping[str, Sequence[Any]], number: int, width: int, encoding: str
) -> RenderableType:
    """Returns a table of some completions of a step.

    **Arguments:**

    - `columns`: the step's table, as `completion_columns` returns it.
    - `number`: the most completions to show.
    - `width`, `encoding`: columns of the output, and its encoding.
    """
    rows = spread(columns["reward"], number)
    room = max(20, width - 2 * _NUMBER_WIDTH - 3 * _GAP)
    widths = room * 2 // 5, room - room * 2 // 5
    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False)
    for name, size in zip(("prompt", "completion"), widths, strict=True):
        table.add_column(Text(name, _LABEL), width=size, overflow="fold")
    for name in ("reward", "advantage"):
        table.add_column(Text(name, _LABEL), justify="right", width=_NUMBER_WIDTH)
    for row in rows:
        table.add_row()
        texts = [
            cut_in_the_middle(
                columns[name][row],
                int(size * _LINES_OF_A_CELL * _FILLED),
                functools.partial(literal, newlines=False, encoding=encoding),
            )
            for name, size in zip(("prompt", "completion"), widths, strict=True)
        ]
        table.add_row(*texts, _number(columns["reward"][row]), _signed(columns["advantage"][row]))
    title = Text.assemble(
        (f"step {columns['step'][0]}", "bold"),
        (f": {len(rows)} of {len(columns['reward'])} completions, from the best to the worst", ""),
    )
    return _Unpadded(Group(Text(), title, Text(), table))


def as_block(
    row: Mapping[str, Any], encoding: str, *, longest: int, heat: Text | None = None
) -> RenderableType:
    """Returns a completion with its prompt, rewards and logged columns, over the whole width.

    **Arguments:**

    - `row`: the columns of the completion.
    - `encoding`: the encoding of the output.
    - `longest`: characters to show of each text; longer texts are cut in the middle.
    - `heat`: what to show in place of the completion's text.
    """
    each = {x.removeprefix("rewards/"): v for x, v in row.items() if x.startswith("rewards/")}
    parts = f" ({', '.join(f'{name} {_number(x)}' for name, x in each.items())})"
    header = Text.assemble(
        (f"step {row['step']}", "bold"),
        ("  prompt ", _LABEL), row["prompt_id"],
        ("  reward ", _LABEL), (_number(row["reward"]), "bold"),
        (parts if len(each) > 1 else "", _LABEL),
        ("  advantage ", _LABEL), _signed(row["advantage"]),
        (f"  {row['length']:,} tokens", _LABEL),
        (f", {calls}" if (calls := calls_in_words(row)) else "", _LABEL),
        (", truncated" if row["truncated"] else "", "yellow"),
        (", environment failed" if row.get("tools/lost") else "", "yellow"),
    )  # fmt: skip
    show = functools.partial(literal, encoding=encoding)
    logged = [
        _Unpadded(Text.assemble((f"{name} ", _LABEL), cut_in_the_middle(str(x), longest, show)), 2)
        for name, x in row.items()
        if is_logged(name) and x is not None
    ]
    prompt = cut_in_the_middle(row["prompt"], longest, show)
    prompt.stylize(_LABEL)
    completion = heat
    if completion is None:
        completion = cut_in_the_middle(row["completion"], longest, show)
    texts = _Unpadded(prompt, 2), _Unpadded(completion, 4)
    return Group(_Unpadded(header), *texts, *logged, Text())


def calls_in_words(row: Mapping[str, Any]) -> str:
    """Returns how many calls of tools a completion made, and how many failed; empty if unknown."""
    if (calls := row.get("tools/calls")) is None:
        return ""
    failed = f" ({row['tools/failures']} failed)" if row.get("tools/failures") else ""
    return f"{calls} call{'' if calls == 1 else 's'}{failed}"


def is_logged(column: str) -> bool:
    """Returns whether a column is shown below a completion, as those that functions have logged."""
    own = column in SHOWN_COLUMNS or column in TOKEN_COLUMNS
    return not own and not column.startswith(("rewards/", "tools/"))


@dataclasses.dataclass(frozen=True)
class _Unpadded:
    """A renderable with an indent, and without spaces at the ends of its lines."""

    shown: RenderableType
    indent: int = 0

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        within = options.update(width=options.max_width - self.indent)
        for line in console.render_lines(self.shown, within, pad=False):
            while line and not line[-1].text.strip():
                line.pop()
            if line:
                yield Segment(" " * self.indent)
                *before, last = line
                yield from before
                yield Segment(last.text.rstrip(), last.style)
            yield Segment.line()


def side_by_side(
    steps: Mapping[int, Sequence[Mapping[str, Any]]],
    encoding: str,
    *,
    per_step: int,
    longest: int,
    width: int,
) -> RenderableType:
    """Returns a prompt and its completions, with a column for each step, as far as they have room.

    **Arguments:**

    - `steps`: the prompt's completions of each step.
    - `encoding`: the encoding of the output.
    - `per_step`: the most completions to show of each step.
    - `longest`: characters to show of each text; longer texts are cut in the middle.
    - `width`: columns of the output.
    """
    room = max(1, (width + _GAP) // (_COLUMN_OF_A_STEP + _GAP))
    numbers = list(steps)
    chosen = [numbers[i] for i in evenly(len(numbers), room)]
    size = (width + _GAP) // len(chosen) - _GAP
    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False)
    for step in chosen:
        rewards = [row["reward"] for row in steps[step]]
        known = [x for x in rewards if not math.isnan(x)]
        mean = f"mean reward {sum(known) / len(known):.3g}" if known else "no rewards"
        about = Text.assemble((f"step {step}", "bold"), (f"  {mean} of {len(known)}", _LABEL))
        table.add_column(about, width=size, overflow="fold")
    shown = {
        step: [steps[step][i] for i in spread([row["reward"] for row in steps[step]], per_step)]
        for step in chosen
    }
    for rank in range(max(map(len, shown.values()))):
        table.add_row()
        cells = [
            _cell(rows[rank], longest, encoding) if rank < len(rows) else Text()
            for rows in shown.values()
        ]
        table.add_row(*cells)
    left_out = len(numbers) - len(chosen)
    are = "1 more step has" if left_out == 1 else f"{left_out} more steps have"
    note = Text(f"{are} no room: narrow them down with --steps", _LABEL)
    first = steps[chosen[0]][0]
    id_ = Text.assemble(("prompt ", _LABEL), first["prompt_id"])
    prompt = cut_in_the_middle(
        first["prompt"], longest, functools.partial(literal, encoding=encoding)
    )
    return _Unpadded(Group(id_, prompt, Text(), table, *([Text(), note] if left_out else [])))


def _cell(row: Mapping[str, Any], longest: int, encoding: str) -> Text:
    text = cut_in_the_middle(
        row["completion"], longest, functools.partial(literal, encoding=encoding)
    )
    return Text.assemble((f"{_number(row['reward'])}  ", "bold"), text)


def _number(value: float) -> str:
    return "none" if math.isnan(value) else f"{value:.3g}"


def _signed(value: float) -> str:
    return "none" if math.isnan(value) else f"{value:+.2f}"


def _descending(value: float) -> float:
    return math.inf if math.isnan(value) else -value
