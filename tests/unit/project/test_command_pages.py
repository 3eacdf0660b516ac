"""Test the reference of commands that the site shows, with a command that has every kind of option."""

from __future__ import annotations

import click
import pytest

from docs.command_pages import expand
from zlaunch.cli.commands import Option

PAGE = """# CLI

::: command
    :module: tests.unit.project.test_command_pages
    :command: {}
    :prog_name: zlaunch demo

End
"""


@click.command("demo", help="Show RUN with `--all` or --rank=3.\n\n\b\nkept as\nit is")
@click.argument("run")
@click.option(
    "--kind", type=click.Choice(["a", "b"]), default="a", show_default=True, help="Kind of node[1-4]."
)
@click.option("-n", "--lines", type=click.IntRange(min=1), required=True, help="Lines to show <now>.")
@click.option("--hidden", hidden=True, help="Never shown.")
@click.option("--where", cls=Option, group="Where to run", help="Host.")
def demo(**given: object) -> None:
    """Do nothing."""


@click.group()
def several() -> None:
    """Hold one command."""


several.add_command(demo)


@pytest.mark.parametrize(
    "shown",
    [
        "### zlaunch demo\n",
        "```text\nzlaunch demo [OPTIONS] RUN\n```",
        "Show RUN with `--all` or <code>--rank=3</code>.",
        "```text\nkept as\nit is\n```",
        "| <code>--kind [a&#124;b]</code> | Kind of <code>node[1-4]</code>. Default: a. |",
        "Lines to show <code>&lt;now&gt;</code>. Range: x&gt;=1. Required. |",
        "\nEnd\n",
    ],
)
def test_a_command_is_shown_with_its_usage_help_and_options(shown: str) -> None:
    assert shown in expand(PAGE.format("demo"))


def test_hidden_options_and_the_marks_of_click_are_left_out() -> None:
    page = expand(PAGE.format("demo"))
    assert "hidden" not in page and "[default" not in page and "[required" not in page and "\b" not in page


def test_commands_of_a_group_come_below_it() -> None:
    page = expand(PAGE.format("several"))
    assert page.index("### zlaunch demo\n") < page.index("#### zlaunch demo demo\n")
