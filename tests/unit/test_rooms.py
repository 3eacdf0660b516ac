"""The engine and the public functions know no optional room of the runtime; the assembly gives them what they
need of it.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

RUNTIME = Path(__file__).resolve().parents[2] / "runtime"
OPTIONAL = ("offload", "memory", "activation", "checkpoint.convert", "checkpoint.export")


def imported(path: Path) -> set[str]:
    """Returns the runtime's modules that a module beside ``build.py`` imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.removeprefix("zlaunch.runtime.") for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = (node.module or "").removeprefix("zlaunch.runtime").lstrip(".")
            found |= {f"{module}.{alias.name}".lstrip(".") for alias in node.names}
    return found


def rooms_of(path: Path) -> set[str]:
    return {room for room in OPTIONAL for name in imported(path) if f"{name}.".startswith(f"{room}.")}


@pytest.mark.parametrize("name", ["api.py", "engine.py", "loop.py", "preemption.py"])
def test_the_core_imports_no_optional_room(name: str) -> None:
    assert rooms_of(RUNTIME / name) == set()


def test_the_assembly_is_found_to_import_them() -> None:
    """The search above finds what it looks for."""
    assert rooms_of(RUNTIME / "build.py") == {"offload", "memory", "activation", "checkpoint.export"}
