"""Test what the command line says about itself."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import click
import pytest

from zlaunch.cli.commands import SUBCOMMANDS, load
from zlaunch.cli.main import main
from zlaunch.cli.run import run


def every_command() -> Iterator[tuple[list[str], click.Command]]:
    """The words after `zlaunch` and their command, groups and what is in them."""
    found: list[tuple[list[str], click.Command]] = [
        ([], run),
        *(([name], load(name)) for name in SUBCOMMANDS),
    ]
    for words, command in found:
        yield words, command
        if isinstance(command, click.Group):
            found += [([*words, name], inner) for name, inner in command.commands.items()]


COMMANDS = list(every_command())
IDS = [" ".join(words) or "run" for words, _ in COMMANDS]


@pytest.mark.parametrize(("words", "command"), COMMANDS, ids=IDS)
def test_every_command_and_option_says_what_it_does(words: list[str], command: click.Command) -> None:
    assert command.help
    options = [each for each in command.params if isinstance(each, click.Option) and not each.hidden]
    assert [each.opts for each in options if not each.help] == []


@pytest.mark.parametrize(("words", "command"), COMMANDS, ids=IDS)
def test_all_ways_to_ask_for_help_give_the_same(
    words: list[str], command: click.Command, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = []
    for arguments in ([*words, "-h"], [*words, "--help"], ["help", *words]):
        assert main(arguments) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0].startswith(" ".join(["Usage: zlaunch", *words]))
    assert shown[0] == shown[1] == shown[2]
    assert "-h, --help" in shown[0]


def test_the_help_has_a_line_for_every_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    for name in SUBCOMMANDS:
        (line,) = [line for line in lines if line.split()[:2] == ["zlaunch", name]]
        assert line.endswith("."), f"{line!r} goes on in the next line"


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["checkpont"], "help: no command 'checkpont', did you mean checkpoint?"),
        (["slurm", "x"], "help: no command 'x', there is script, submit"),
        (["ps", "x"], "help: no command 'x', there is none below"),
    ],
)
def test_help_for_what_is_not_there(
    words: list[str], answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["help", *words]) == 2
    assert capsys.readouterr().err == f"zlaunch: error: {answer}\n"


def test_a_launch_imports_no_other_command() -> None:
    code = "import sys, zlaunch.cli.main, zlaunch.cli.run; print('zlaunch.cli.doctor' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--num_gpu", "2", "x.py"], "No such option '--num_gpu'. Did you mean '--num_gpus'?"),
        (
            ["--nproc_per_nod", "2", "x.py"],
            "No such option '--nproc_per_nod'. Did you mean '--nproc_per_node'?",
        ),
        (["--num_gpus", "two", "x.py"], "'two' is not a whole number."),
        (["--hang_timeout", "long", "x.py"], "'long' is not a number."),
        (["chekpoint", "ls"], "no script 'chekpoint', did you mean `zlaunch checkpoint`?"),
        (["last"], "no script 'last', did you mean `zlaunch ps last`, or stop or stacks?"),
        (["ps", "--claen"], "Did you mean '--clean'?"),
    ],
)
def test_a_slip_is_answered_with_what_was_meant(
    words: list[str], answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    said = capsys.readouterr().err
    assert answer in said and said.count("\n") == 1
