"""Run cells of the table, all of a family in one set of ranks."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from itertools import groupby
from pathlib import Path

import zlaunch
from tests.limits import MATRIX_LIMIT_S
from tests.numerics.cell import WORLD, Cell, Result, run_cells
from tests.runtime.workers import WorkerError, run_workers

_STARTED, _DONE = "started", "done"


def work(cells: list[Cell], folder: str) -> None:
    """Run cells of one family in this rank; results are appended to a file as they come."""
    zlaunch.init_distributed()
    done = Path(folder, _DONE)

    def report(cell: Cell, result: Result) -> None:
        with done.open("a") as file:
            file.write(json.dumps([str(cell), result.as_json()]) + "\n")

    with Path(folder, "output").open("w") as output, redirect_stdout(output), redirect_stderr(output):
        run_cells(cells, Path(folder), report)


def run_family(cells: Sequence[Cell]) -> Iterator[tuple[Cell, Result]]:
    """Run cells of one family; ranks that a cell ends are replaced, and the cell's error is its result."""
    left = list(cells)
    while left:
        trouble = ""
        with tempfile.TemporaryDirectory(prefix="zlaunch-numerics-") as folder:
            try:
                run_workers(work, WORLD, left, folder, limit_s=MATRIX_LIMIT_S)
            except WorkerError as error:
                trouble = str(error)
            done = Path(folder, _DONE)
            lines = [json.loads(line) for line in done.read_text().splitlines()] if done.exists() else []
        for cell, (name, found) in zip(left, lines, strict=False):
            assert name == str(cell)
            result = Result(**found)
            if cell.refused:
                result.wrong.append(f"no error that says {cell.refused!r}")
            yield cell, result
        left = left[len(lines) :]
        if trouble and left:
            cell = left.pop(0)
            if cell.refused and re.search(cell.refused, trouble):
                yield cell, Result(refused=True)
            else:
                yield cell, Result(wrong=[f"ended with {_last_lines(trouble)}"])
        elif left:
            raise AssertionError(f"the ranks ended before {left[0]} without an error")


def run(cells: Sequence[Cell]) -> Iterator[tuple[Cell, Result]]:
    """Run cells, one family after the other."""
    for _, group in groupby(cells, key=lambda cell: cell.family):
        yield from run_family(list(group))


def _last_lines(trouble: str) -> str:
    """Give the exception of a traceback, then the traceback's end."""
    lines = trouble.rstrip().splitlines()
    return "\n".join([lines[-1], *lines[-12:]]) if lines else "no error"
