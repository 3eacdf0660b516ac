"""Run the table of numerics: ``python -m tests.numerics [--families A,B] [--write docs/numerics.md]``."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.numerics.cell import PRECISIONS, STAGES, WAYS, Cell, Result, cells_of
from tests.numerics.families import FAMILIES
from tests.numerics.page import read_deepspeed, write_page
from tests.numerics.run import run


def _listed(known: list[Any], kind: Callable[[str], Any] = str) -> Callable[[str], list[Any]]:
    """Make a parser of comma-separated names that refuses unknown ones."""

    def parse(text: str) -> list[Any]:
        found = [kind(word) for word in text.split(",")]
        if unknown := [name for name in found if name not in known]:
            choices = ", ".join(map(str, known))
            raise argparse.ArgumentTypeError(f"unknown: {unknown[0]}. Choose from {choices}")
        return found

    return parse


def parser() -> argparse.ArgumentParser:
    """Make the parser of the command line."""
    made = argparse.ArgumentParser(prog="python -m tests.numerics", description=__doc__.partition(":")[0])
    axes: dict[str, tuple[list[Any], Callable[[str], Any]]] = {
        "families": (list(FAMILIES), str),
        "dtypes": (list(PRECISIONS), str),
        "stages": (list(STAGES), int),
        "ways": (list(WAYS), str),
    }
    for name, (known, kind) in axes.items():
        made.add_argument(
            f"--{name}", type=_listed(known, kind), default=known, metavar="A,B", help="[default: all]"
        )
    made.add_argument(
        "--write", type=Path, metavar="FILE", help="Write the page. [default: print failures only]"
    )
    return made


def main() -> int:
    """Run the cells that were asked for, print those that are wrong, and write the page."""
    options = parser().parse_args()
    cells = [
        cell
        for family in options.families
        for cell in cells_of(family)
        if cell.precision in options.dtypes and cell.stage in options.stages and cell.way in options.ways
    ]
    results: dict[Cell, Result] = {}
    start = time.monotonic()
    for cell, result in run(cells):
        results[cell] = result
        for line in result.wrong:
            print(f"{cell}: {line}", flush=True)
        if sys.stderr.isatty():
            print(f"\r{len(results)} of {len(cells)} cells", end="", file=sys.stderr, flush=True)
    wrong = sum(bool(result.wrong) for result in results.values())
    print(f"{len(results)} cells in {time.monotonic() - start:.0f} s: {wrong} wrong")
    if options.write:
        write_page(options.write, results, read_deepspeed())
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
