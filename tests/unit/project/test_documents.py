"""Check that the documents point to what is there."""

from __future__ import annotations

import copy
import html
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import torch

import zlaunch
from docs.command_pages import expand
from tests.docs_commands import command_lines
from tests.folders import with_table
from zlaunch.cli.commands import SUBCOMMANDS, load
from zlaunch.cli.run import run

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
DOCUMENTS = sorted([*ROOT.glob("*.md"), *PAGES, *(ROOT / "benchmarks").rglob("*.md")])
NAMES = [str(path.relative_to(ROOT)) for path in DOCUMENTS]
REPOSITORY = "https://github.com/zlaunch/zlaunch"
RAW = "https://raw.githubusercontent.com/zlaunch/zlaunch"


def in_repository(url: str) -> str | None:
    """Return the path, with its anchor, that a link to our repository on the web leads to; None for others.

    The README's links are absolute: PyPI shows it without the files beside it.
    """
    match = re.fullmatch(rf"{REPOSITORY}/(?:blob|tree|raw)/main/(.+)|{RAW}/main/(.+)", url)
    return match and (match[1] or match[2])


def anchors(path: Path) -> set[str]:
    """The names of a document's headings, as the sites that show it make them."""
    heads = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("document", DOCUMENTS, ids=NAMES)
def test_every_link_leads_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        ours = in_repository(target)
        if ours is None and target.startswith(("https://", "http://")):
            continue
        name, _, anchor = (ours or target).partition("#")
        folder = document.parent if ours is None else ROOT
        path = folder / name if name else document
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


@pytest.mark.parametrize("name", ["docs/architecture.md", "docs/internals.md", "CONTRIBUTING.md"])
def test_every_module_that_is_named_exists(name: str) -> None:
    modules = [f"/{path.relative_to(ROOT)}" for path in ROOT.glob("*/**/*.py") if ".venv" not in path.parts]
    named = set(re.findall(r"`((?:[\w.]+/)*[\w.]+\.py)`", (ROOT / name).read_text())) - {"train.py"}
    assert len(named) > 10
    assert not sorted(each for each in named if not any(path.endswith(f"/{each}") for path in modules))


def test_the_table_of_folders_is_that_of_the_docstrings() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert "| `runtime/zero/` | ZeRO" in page
    assert with_table(page) == page, "run: python -m tests.folders"


COMMAND_LINES = command_lines()


@pytest.mark.parametrize(
    ("place", "words"), COMMAND_LINES, ids=[f"{place}: {' '.join(words)}" for place, words in COMMAND_LINES]
)
def test_every_command_line_of_the_pages_is_understood(place: str, words: list[str]) -> None:
    words = words[1:]
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


def subcommands(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    """Yield a command and all below it, with the words that call each."""
    yield name, command
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            yield from subcommands(f"{name} {inner.name}", inner)


def test_the_reference_shows_every_option_and_subcommand() -> None:
    page = expand((ROOT / "docs" / "cli.md").read_text())
    shown = html.unescape(re.sub(r"<[^>]+>", "", page))
    commands = [("zlaunch", run), *((f"zlaunch {name}", load(name)) for name in SUBCOMMANDS)]
    every = [each for name, command in commands for each in subcommands(name, command)]
    options = {
        option
        for _, command in every
        for each in command.params
        if isinstance(each, click.Option) and not each.hidden
        for option in (*each.opts, *each.secondary_opts)
    }
    assert len(options) > 100
    assert sorted(option for option in options if not re.search(rf"(?<![\w-]){option}(?![\w-])", shown)) == []
    assert [name for name, _ in every if name not in shown] == []


def test_every_public_name_is_in_its_reference() -> None:
    names = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    wanted = {f"zlaunch.{name}" for name in zlaunch.__all__ if name not in ("__version__", "zero")}
    wanted |= {f"zlaunch.zero.{name}" for name in zlaunch.zero.__all__}
    assert sorted(names) == sorted(wanted)


def test_the_page_of_the_engine_has_what_guides_use() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    shown = set(re.findall(r"^ {8}- (\w+)$", page, re.MULTILINE))
    assert shown and not [name for name in shown if not getattr(zlaunch.Engine, name).__doc__]
    known = shown | set(re.findall(r"``(\w+)``", zlaunch.Engine.__doc__ or "")) | set(dir(torch.nn.Module))
    pages = [*(ROOT / "docs" / "guides").glob("*.md"), ROOT / "docs" / "get-started.md", ROOT / "README.md"]
    for path in (*pages, *(ROOT / "examples").rglob("*.py")):
        used = set(re.findall(r"\bengine\.(\w+)", path.read_text()))
        assert not used - known, f"{path}: not on docs/api.md"
