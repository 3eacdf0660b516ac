"""Run the table of numerics: ``python -m tests.numerics [--families A,B] [--write docs/numerics.md]``.

Results are kept in a file as they come: an interrupted run goes on from there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.numerics.cell import PRECISIONS, STAGES, WAYS, Result, cells_of
from tests.numerics.families import FAMILIES
from tests.numerics.page import read_deepspeed, write_page
from tests.numerics.run import run

ROOT = Path(__file__).resolve().parents[2]


def _listed(known: list[Any], kind: Callable[[str], Any] = str) -> Callable[[str], list[Any]]:
    """Make a parser of comma-separated names that refuses unknown ones."""

    def parse(text: str) -> list[Any]:
        found = [kind(word) for word in text.split(",")]
        if unknown := [name for name in found if name not in known]:
            choices = ", ".join(map(str, known))
            raise argparse.ArgumentTypeError(f"unknown: {unknown[0]}. Choose from {choices}")
        return found

    return parse


def source_state() -> str:
    """Give a digest of the source that results depend on: results of another source are not used."""
    digest = hashlib.sha256()
    folders = (Path(__file__).parent, ROOT / "runtime", ROOT / "cuda_ops")
    for path in sorted(path for folder in folders for path in folder.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def read_results(path: Path, state: str) -> dict[str, Result]:
    """Read what an interrupted run with the same source has kept, by the cell's name."""
    if not path.exists():
        return {}
    kept = [json.loads(line) for line in path.read_text().splitlines()]
    return {line["cell"]: Result(**line["result"]) for line in kept if line["state"] == state}


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
    made.add_argument(
        "--keep",
        type=Path,
        metavar="FILE",
        help="Append each result to FILE, and take from it what a run with the same source has put there.",
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
    state = source_state()
    kept = read_results(options.keep, state) if options.keep else {}
    results = {cell: kept[str(cell)] for cell in cells if str(cell) in kept}
    if results:
        print(f"{len(results)} cells are in {options.keep}", flush=True)
    start = time.monotonic()
    for cell, result in run([cell for cell in cells if cell not in results]):
        results[cell] = result
        if options.keep:
            entry = {"cell": str(cell), "state": state, "result": result.as_json()}
            with options.keep.open("a") as file:
                file.write(json.dumps(entry) + "\n")
        for line in result.wrong:
            print(f"{cell}: {line}", flush=True)
        if sys.stderr.isatty():
            print(f"\r{len(results)} of {len(cells)} cells", end="", file=sys.stderr, flush=True)
    wrong = sum(bool(result.wrong) for result in results.values())
    print(f"{len(results)} cells in {time.monotonic() - start:.0f} s: {wrong} wrong")
    if options.write:
        write_page(options.write, {cell: results[cell] for cell in cells}, read_deepspeed())
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
