"""Test what the command line says about itself."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import click
import pytest

from zlaunch.cli.commands import COMMAND_GROUPS, SUBCOMMANDS, Option, command_groups, load
from zlaunch.cli.flags import torchrun_flags
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


def shown_at(columns: int, *words: str) -> list[str]:
    """The lines that a terminal of this width shows."""
    environ = {**os.environ, "COLUMNS": str(columns)}
    command = [sys.executable, "-m", "zlaunch", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=True)
    return done.stdout.splitlines()


def test_the_help_fits_a_terminal_of_24_lines() -> None:
    lines = shown_at(80, "-h")
    assert len(lines) <= 23, "and the prompt"
    assert max(map(len, lines)) <= 80
    options = [line.split()[0].rstrip(",") for line in lines if line.startswith("  -")]
    assert 8 <= len(options) <= 11 and {"--num_gpus", "-H", "--dry_run", "-h"} <= set(options)
    text = " ".join(lines)
    for title, names in command_groups():
        assert title in text and ", ".join(names) in " ".join(text.split())
    assert "--num_accelerators" not in text, "aliases are in the long help"


def test_every_command_is_in_one_group() -> None:
    grouped = [name for _, names in command_groups() for name in names]
    assert sorted(grouped) == sorted(SUBCOMMANDS)
    assert [title for title, _ in command_groups()] == list(COMMAND_GROUPS), "there are no others"


def test_the_long_help_has_every_option_and_command() -> None:
    lines = shown_at(80, "--help-all")
    assert "--help_all" in " ".join(lines) and lines == shown_at(80, "--help_all")
    words = " ".join(" ".join(lines).split())
    assert "Set OMP_NUM_THREADS of the workers. [default: a node's cores / workers]" in words
    names = {word.strip(",") for line in lines for word in line.split() if word.startswith("-")}
    options = [each for each in run.params if isinstance(each, Option) and (each.group or not each.hidden)]
    assert [name for each in (*options, *torchrun_flags()) for name in each.opts if name not in names] == []
    titles = [line[:-1] for line in lines if line.endswith(":") and not line.startswith(" ")]
    groups = ["Where to run", "Workers", "Failures", "Output", "SLURM", "DeepSpeed's names"]
    assert titles[: len(groups)] == groups
    for name in SUBCOMMANDS:
        (line,) = [line for line in lines if line.split()[:2] == ["zlaunch", name]]
        assert line.endswith("."), f"{line!r} goes on in the next line"


@pytest.mark.parametrize("words", [["submit"], ["doctor"], ["bench", "net"]], ids=" ".join)
def test_other_commands_refer_to_the_options_of_a_launch(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    main([*words, "-h"])
    shown = capsys.readouterr().out
    assert "`zlaunch --help-all` lists the options of a launch." in shown
    assert "--ssh_port" not in shown and shown.count("\n") < 30


def test_run_is_a_launch(capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for words in (["-h"], ["run", "-h"], ["help", "run"]):
        assert main(words) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] == shown[2]


@pytest.mark.parametrize(
    "line",
    [
        "estimate --params 1e9 --num{}gpus 8 --gpu{}mem 80 --for fits",
        "slurm script --num{}nodes 2 --num{}gpus 2 --cpus{}per{}task 8 --job{}name x t.py",
        "slurm script --nodes 2 --gpus{}per{}node 2 --cpus{}per{}task 8 t.py",
        "k8s script --image me/x --num{}nodes 2 --num{}gpus 2 --max{}restarts 1 t.py",
        "k8s script --image me/x --nodes 2 --gpus 2 --restarts 1 t.py",
        "bundle --dry{}run nosuch",
    ],
)
def test_dashes_and_underscores_are_the_same(line: str, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    shown = []
    for between in "_-":
        assert main(line.replace("{}", between).split()) == (2 if "nosuch" in line else 0)
        shown.append(capfdbinary.readouterr())
    assert shown[0] == shown[1]


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
        (["--num_gpsu", "2", "x.py"], "No such option --num_gpsu. Did you mean --num_gpus?"),
        (
            ["--nproc_per_ndoe", "2", "x.py"],
            "No such option --nproc_per_ndoe. Did you mean --nproc_per_node?",
        ),
        (["--num_gpus", "two", "x.py"], "'two' is not a whole number."),
        (
            ["--num_gpus", "0,2-3", "x.py"],
            "0,2-3 is a list of GPUs, not their number: use --include localhost:0,2-3",
        ),
        (["--hang_timeout", "long", "x.py"], "'long' is not a number."),
        (["chekpoint", "ls"], "no script 'chekpoint', did you mean `zlaunch checkpoint`?"),
        (["last"], "no script 'last', did you mean `zlaunch ps last`, or stop or stacks?"),
        (["ps", "--claen"], "Did you mean --clean?"),
    ],
)
def test_a_slip_is_answered_with_what_was_meant(
    words: list[str], answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    said = capsys.readouterr().err
    assert answer in said and said.count("\n") == 1
