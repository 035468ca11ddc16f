"""Columns of the tables that reports print."""

from typing import Literal

from rich.table import Table


def columns(table: Table, *names: str, right: set[int] | None = None) -> None:
    """Adds columns; all but the first are of numbers, or those that `right` lists.

    What is too wide for its column goes on in the next line: a number that is cut off would read as
    another one.
    """
    numbers = set(range(1, len(names))) if right is None else right
    for i, name in enumerate(names):
        justify: Literal["left", "right"] = "right" if i in numbers else "left"
        table.add_column(name, justify=justify, overflow="fold")
