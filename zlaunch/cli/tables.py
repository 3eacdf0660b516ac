"""Print the commands' tables. Imported where one is shown: rich takes a while to import."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text


def stdout_console() -> Console:
    """Return a console for stdout, with a fixed width where that is no terminal."""
    return Console(width=None if sys.stdout.isatty() else 160, highlight=False)


def make_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    *,
    title: str = "",
    right: Collection[str] = (),
    whole: Collection[str] = (),
    padding: tuple[int, int, int, int] = (0, 1, 0, 1),
) -> Table:
    """Make a table of literal text: the columns `right` are aligned to the right, `whole` never wrapped."""
    table = Table(box=box.SIMPLE, title=Text(title) if title else None, title_justify="left", padding=padding)
    for column in columns:
        table.add_column(
            column,
            justify="right" if column in right else "left",
            overflow="fold",
            no_wrap=column in whole,
        )
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return table
