"""Test that the README is short, and that its example, figures and pictures are those of the repository."""

from __future__ import annotations

import difflib
import html
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs.comparison_chart import PICTURE, draw, figures, panels
from tests.limits import LIMIT_S
from tests.needs import needs_package
from tests.unit.project.test_documents import RAW, REPOSITORY

ROOT = Path(__file__).resolve().parents[3]
README = (ROOT / "README.md").read_text()
EXAMPLE = ROOT / "examples" / "quickstart"


def texts(picture: Path) -> list[str]:
    """Return the texts of an SVG file, in order."""
    found = re.findall(r"<text\b[^>]*>([^<]*)</text>", picture.read_text())
    return [html.unescape(text).replace("\xa0", " ").rstrip() for text in found]


def test_the_readme_is_short() -> None:
    assert len(README.split()) <= 900


def test_links_of_the_readme_are_absolute() -> None:
    """PyPI shows the README without the files beside it."""
    targets = re.findall(r"\]\(([^)\s]+)\)", README)
    assert [target for target in targets if not target.startswith("https://")] == []
    for name in ("docs/status.md", "docs/get-started.md", "docs/index.md", "docs/config.md"):
        assert any(target.startswith(f"{REPOSITORY}/blob/main/{name}") for target in targets), name
    for name in ("CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "CITATION.cff"):
        assert f"{REPOSITORY}/blob/main/{name}" in targets
    for name in ("terminal", "comparison"):
        assert f"{RAW}/main/docs/assets/{name}.svg" in targets


def test_the_example_is_a_diff_of_at_most_ten_lines() -> None:
    plain, zero3 = ((EXAMPLE / name).read_text().splitlines() for name in ("plain.py", "zero3.py"))
    _, _, _, *diff = difflib.unified_diff(plain, zero3, n=len(plain), lineterm="")
    assert 0 < sum(line[0] in "+-" for line in diff) <= 10
    shown = re.findall(r"```diff\n(.*?)\n```", README, re.DOTALL)
    assert shown == ["\n".join(line.rstrip() for line in diff)]


@pytest.mark.exhaustive
def test_the_plain_script_of_the_example_trains() -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLE / "plain.py"], capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss (\S+)$", done.stdout, re.MULTILINE)]
    assert len(losses) == 10 and losses[-1] < losses[0] / 100


def test_the_figures_of_the_readme_are_those_of_the_results() -> None:
    shown = README.partition("\n## Measured\n")[2].partition("\n## ")[0]
    assert re.findall(r"^- (.*)$", shown, re.MULTILINE) == figures()


def test_the_committed_chart_shows_every_result() -> None:
    shown = texts(PICTURE)
    for panel in panels():
        assert panel.title in shown
        assert {*panel.bars, *panel.labels} <= set(shown)


@pytest.mark.exhaustive
@needs_package("matplotlib")
def test_the_chart_is_made_of_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare texts: the curves of another matplotlib may differ in a digit."""
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path))
    draw(tmp_path / "one.svg")
    assert texts(tmp_path / "one.svg") == texts(PICTURE)
    draw(tmp_path / "again.svg")
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "again.svg").read_bytes()


def test_the_picture_of_the_terminal_shows_the_readmes_command() -> None:
    picture = ROOT / "docs" / "assets" / "terminal.svg"
    shown = " ".join(texts(picture))
    command = re.search(r"^\$ (zlaunch .*quickstart.*)$", README, re.MULTILINE)
    assert command is not None and command[1] in shown
    assert len(re.findall(r"step \d+: loss \d", shown)) > 3
    assert "http" not in re.sub(r'xmlns="[^"]*"|<!--.*?-->', "", picture.read_text()), "no font is loaded"
