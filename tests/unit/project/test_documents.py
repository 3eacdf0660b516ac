"""Check that the documents point to what is there."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from zlaunch.cli.commands import SUBCOMMANDS, load
from zlaunch.cli.run import run

ROOT = Path(__file__).resolve().parents[3]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").rglob("*.md")])
NAMES = [str(path.relative_to(ROOT)) for path in DOCUMENTS]
README = (ROOT / "README.md").read_text()


def anchors(path: Path) -> set[str]:
    """The names of a document's headings, as the sites that show it make them."""
    heads = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("document", DOCUMENTS, ids=NAMES)
def test_every_link_leads_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if target.startswith(("https://", "http://")):
            continue
        name, _, anchor = target.partition("#")
        path = document.parent / name if name else document
        assert path.exists(), f"{document.name}: {target}"
        assert not anchor or anchor in anchors(path), f"{document.name}: {target}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=NAMES)
def test_every_test_that_is_named_exists(document: Path) -> None:
    known = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        known |= {path.stem, *re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)}
    text = document.read_text()
    assert not {name for name in re.findall(r"`(tests/[\w/.-]+)`", text) if not (ROOT / name).exists()}
    assert not set(re.findall(r"`(test_\w+)(?:\.py)?`", text)) - known


def test_the_readme_is_among_them_and_has_links() -> None:
    assert "README.md" in NAMES and "docs/status.md" in NAMES
    for name in ("docs/status.md", "docs/config.md", "constraints.txt"):
        assert f"]({name})" in README


def test_every_flag_of_the_readmes_table_exists() -> None:
    known = {name for each in run.params for name in (*each.opts, *each.secondary_opts)} | {"-h", "--help"}
    table = README.partition("## The flags")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `-")]
    flags = {flag for row in rows for flag in re.findall(r"(?<![\w-])--?[a-zA-Z_]\w*", row)}
    assert len(flags) > 30 and sorted(flags - known) == []


def test_every_command_is_in_the_readme() -> None:
    for name in SUBCOMMANDS:
        command = load(name)
        assert f"zlaunch {name}" in README
        for inner in command.commands if isinstance(command, click.Group) else ():
            assert re.search(
                rf"zlaunch {name} {inner}\b|zlaunch {name} [^`]*`, `{inner}\b|`{inner} ", README
            ), inner
