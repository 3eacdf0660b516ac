"""Run the commands of README.md and docs on CPU workers, and compare what they print with the pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs_commands import check_page, pages_for, read_page

PAGES = pages_for("here")
DEAR = ("docs/guides/trainer.md", "docs/guides/sweeps.md")
"""Pages whose first command takes more CPU seconds than tests/budget.py gives a case of `make test`."""


@pytest.mark.rotated
@pytest.mark.sampled(1)
@pytest.mark.parametrize("path", [page for page in PAGES if page.id not in DEAR])
def test_the_first_command_of_a_page_does_what_it_says(path: Path, tmp_path: Path) -> None:
    check_page(read_page(path).beginning("here"), tmp_path, ("here",))


@pytest.mark.exhaustive
@pytest.mark.parametrize("path", PAGES)
def test_the_commands_of_a_page_do_what_it_says(path: Path, tmp_path: Path) -> None:
    check_page(read_page(path), tmp_path, ("here",))
