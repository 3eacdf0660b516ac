"""Run the README's example on a terminal again, and compare the screen with the picture."""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
from collections import defaultdict
from itertools import takewhile
from pathlib import Path

import pytest

from tests.docs_commands import shapes
from tests.limits import EXHAUSTIVE_LIMIT_S
from tests.needs import needs_package

ROOT = Path(__file__).resolve().parents[2]


def lines_of(picture: Path) -> list[str]:
    """Return the lines of a terminal's picture.

    Without the sentence about what bounds a step, the last of a run: it depends on how busy the machine is.
    """
    rows: dict[float, str] = defaultdict(str)
    pattern = r'<text class="terminal-r\d+" x="[^"]*" y="([^"]*)"[^>]*>([^<]*)<'
    for row, text in re.findall(pattern, picture.read_text()):
        rows[float(row)] += html.unescape(text).replace("\xa0", " ")
    lines = [rows[row].rstrip() for row in sorted(rows)]
    return list(takewhile(lambda line: "bounds the step" not in line, lines))


@pytest.mark.exhaustive
@needs_package("pyte")
def test_the_picture_of_the_readme_is_what_a_run_shows(tmp_path: Path) -> None:
    picture = tmp_path / "terminal.svg"
    done = subprocess.run(
        [sys.executable, "-m", "docs.terminal_svg", "--out", picture],
        cwd=ROOT,
        env={**os.environ, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=EXHAUSTIVE_LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    shown, printed = lines_of(ROOT / "docs" / "assets" / "terminal.svg"), lines_of(picture)
    assert len(shown) > 5 and shown[0] == printed[0]
    assert set(shapes(shown)) == set(shapes(printed)), "make it again: python -m docs.terminal_svg"
