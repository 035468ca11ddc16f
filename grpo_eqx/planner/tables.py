"""Columns of the tables that reports print."""

from rich.table import Table


def columns(table: Table, *names: str, right: set[int] | None = None) -> None:
    """Adds columns; all but the first are of numbers, or those that `right` lists."""
    numbers = set(range(1, len(names))) if right is None else right
    for i, name in enumerate(names):
        table.add_column(name, justify="right" if i in numbers else "left")
