"""Check that the documents point to what is there."""

from __future__ import annotations

import copy
import re
import shlex
from pathlib import Path

import click
import pytest

import zlaunch
from zlaunch.cli.commands import SUBCOMMANDS, load
from zlaunch.cli.run import run

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
DOCUMENTS = sorted([*ROOT.glob("*.md"), *PAGES, *(ROOT / "benchmarks").rglob("*.md")])
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
    if document.parent.name == "decisions":
        return  # they tell of what was there once
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


COMMAND_LINES = [
    (page.name, line.strip())
    for page in PAGES
    for line in page.read_text().splitlines()
    if line.startswith("    zlaunch ") and "..." not in line
]


@pytest.mark.parametrize(
    ("page", "line"), COMMAND_LINES, ids=[f"{page}: {line}" for page, line in COMMAND_LINES]
)
def test_every_command_line_of_the_pages_is_understood(page: str, line: str) -> None:
    words = shlex.split(line.partition(" > ")[0], comments=True)[1:]
    command: click.Command = copy.copy(run)
    command.params = list(run.params)  # flags of other launchers are added there
    parent = None
    if words[0] in SUBCOMMANDS:
        command = load(words.pop(0))
        while isinstance(command, click.Group):
            parent = click.Context(command, parent, **command.context_settings)
            command = command.commands[words.pop(0)]
    with command.make_context(command.name, words, parent) as context:
        assert not context.args


def test_every_command_is_in_its_reference() -> None:
    text = (ROOT / "docs" / "cli.md").read_text()
    blocks = re.findall(r":module: (\S+)\n +:command: (\S+)\n +:prog_name: zlaunch(?: (\S+))?\n", text)
    assert {name: f"{module}:{command}" for module, command, name in blocks if name} == SUBCOMMANDS
    assert blocks[0] == ("zlaunch.cli.run", "run", "")


def test_every_public_name_is_in_its_reference() -> None:
    names = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    wanted = {f"zlaunch.{name}" for name in zlaunch.__all__ if name not in ("__version__", "zero")}
    wanted |= {f"zlaunch.zero.{name}" for name in zlaunch.zero.__all__}
    assert sorted(names) == sorted(wanted)
