"""Run the pages of the documentation that need a GPU, and compare what they print."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs_commands import check_page, pages_for, read_page


@pytest.mark.gpu
@pytest.mark.exhaustive
@pytest.mark.parametrize("path", pages_for("gpu"))
def test_the_commands_of_a_page_do_what_it_says(path: Path, tmp_path: Path) -> None:
    check_page(read_page(path), tmp_path, ("here", "gpu"))
