"""Test where tests stand: those of units and of ranks in folders named like the source's rooms."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TESTS = ROOT / "tests"
OTHER_FOLDERS = ("benchmarks", "project")
"""Folders of tests/unit that are no rooms. ``project`` tests the source's shape, documents and packages."""


def rooms() -> set[str]:
    """Name the packages in zlaunch/, the linked ones too, and in runtime/."""
    return {
        path.parent.name
        for folder in ("zlaunch", "runtime")
        for path in (ROOT / folder).glob("*/__init__.py")
    }


@pytest.mark.parametrize("kind", ["unit", "runtime"])
def test_every_test_is_in_the_folder_of_a_room(kind: str) -> None:
    """Files directly in tests/runtime test the modules directly in runtime/."""
    paths = list((TESTS / kind).rglob("test_*.py"))
    assert len(paths) > 20 and {"zero", "supervisor", "runtime", "slurm"} <= rooms()
    known = {*rooms(), *OTHER_FOLDERS}
    assert not [str(path) for path in paths if path.parent.name not in known]
    assert not [str(path) for path in paths if len(path.relative_to(TESTS / kind).parts) > 2]


def test_data_is_in_the_folder_for_data() -> None:
    found = [path for path in TESTS.rglob("*") if path.is_file() and TESTS / "data" not in path.parents]
    assert not [str(path) for path in found if path.suffix not in (".py", ".pyc")]
