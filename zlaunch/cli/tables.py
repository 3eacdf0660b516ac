"""Print the commands' tables. Imported where one is shown: rich takes a while to import."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Collection, Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text


def stdout_console(least: int = 0, pipe_columns: int = 160) -> Console:
    """Return a console for stdout, of ``pipe_columns`` where that is no terminal. A terminal that is narrower
    than ``least`` columns breaks the lines itself: numbers are whole then.
    """
    if not sys.stdout.isatty():  # COLUMNS says nothing: readline exports the parent's
        return Console(width=pipe_columns, highlight=False)
    return Console(width=max(least, shutil.get_terminal_size().columns), highlight=False)


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
