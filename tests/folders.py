"""Write the table of folders in docs/architecture.md from the docstrings of the packages.

python -m tests.folders
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
TOPS = ("zlaunch", "hostfiles", "slurm", "cuda_ops", "runtime")


def folders() -> list[Path]:
    """List the folders of the source that are packages, one level below the top, links left out."""
    found = []
    for top in TOPS:
        found.append(ROOT / top)
        found += sorted(
            path.parent for path in (ROOT / top).glob("*/__init__.py") if not path.parent.is_symlink()
        )
    return found


def purpose(folder: Path) -> str:
    """Return the first sentence of a package's docstring, without its full stop."""
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    line = text.partition("\n")[0]
    assert line.endswith("."), f"{folder.name}/__init__.py: the docstring's first line is no sentence"
    return line.removesuffix(".").replace("``", "`")


def table() -> str:
    """Return the table as Markdown."""
    rows = [f"| `{folder.relative_to(ROOT)}/` | {purpose(folder)} |" for folder in folders()]
    return "\n".join(["| folder | purpose |", "|---|---|", *rows])


def with_table(page: str) -> str:
    """Return a page with the present table between its two marks."""
    marks = r"(<!-- folders -->\n).*?(<!-- /folders -->)"
    return re.sub(marks, lambda match: f"{match[1]}{table()}\n{match[2]}", page, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
