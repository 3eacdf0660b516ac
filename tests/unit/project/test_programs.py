"""Test that a machine without the tests' programs is told so, and that their tests are skipped there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.limits import LIMIT_S
from tests.needs import Needs
from tests.programs import NEEDS, SPACE, is_there, missing_space

ROOT = Path(__file__).resolve().parents[3]


PACKAGED = [need for need in NEEDS.values() if need.package and need.name != "venv"]
"""Programs with a package. The module venv is there wherever these tests run."""


def ask(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command without any package of the environment, where no program is found."""
    blind = "import runpy, shutil; shutil.which = lambda *_, **__: None; "
    code = f"{blind}runpy.run_module('tests.programs', run_name='__main__')"
    return subprocess.run(
        [sys.executable, "-S", "-c", code, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


def test_everything_that_is_missing_is_named_with_its_package() -> None:
    done = ask()
    assert done.returncode == 1, done.stderr
    for need in PACKAGED:
        assert f"  {need.name} (apt-get install {need.package})\n" in done.stdout


def test_what_apt_can_install_may_be_left_out() -> None:
    assert "apt-get" not in (shown := ask("--apt").stdout) and "namespaces" not in shown


def test_packages_are_printed_for_apt() -> None:
    done = ask("--packages")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n") == [*sorted({need.package for need in PACKAGED}), ""]


@pytest.mark.parametrize(("free", "is_enough"), [(SPACE - 1, False), (SPACE, True)])
def test_a_full_disk_is_named(monkeypatch: pytest.MonkeyPatch, free: int, is_enough: bool) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=free))
    lines = missing_space()
    assert bool(lines) is not is_enough
    assert is_enough or f"19 GB on the disk of {Path.cwd()} (19 GB are free" in lines[0]


def item(*names: str, fixtures: tuple[str, ...] = ()) -> Any:
    """Make a test with a mark and fixtures."""
    marks = [pytest.mark.needs(*names).mark]
    return SimpleNamespace(iter_markers=lambda name: marks, fixturenames=fixtures, nodeid="x")


def test_what_is_missing_is_the_reason_of_a_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.programs.find", lambda *names: None)
    is_there.cache_clear()
    try:
        for each in (item("g++"), item(fixtures=("library",))):
            with pytest.raises(
                pytest.skip.Exception, match=r"this machine lacks g\+\+ \(apt-get install g\+\+\)"
            ):
                Needs().pytest_runtest_setup(each)
        Needs().pytest_runtest_setup(item())
    finally:
        is_there.cache_clear()


def test_a_name_outside_of_the_table_is_an_error() -> None:
    with pytest.raises(pytest.UsageError, match="gpp"):
        Needs().pytest_collection_modifyitems([item("gpp")])
