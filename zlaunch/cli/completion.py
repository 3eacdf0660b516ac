"""Answer a shell that asks how a line that begins with `zlaunch` may go on.

The protocol and the scripts for the shells are click's, which finds the options too. What an option or an
argument takes is read off its metavar, which the help shows: FILE, DIR, RUN, [ssh|slurm].
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import click
from click.shell_completion import CompletionItem, ShellComplete, get_completion_class

from zlaunch.cli.commands import RUN, SUBCOMMANDS, load
from zlaunch.cli.flags import torchrun_flags
from zlaunch.cli.run import run
from zlaunch.supervisor.found_runs import DEFAULT_FOLDER, find_runs

_SHELLS = ("bash", "zsh", "fish")
_FILES = {"FILE", "PATH", "SCRIPT", "MODEL", "SOURCE"}
_FOLDERS = {"DIR", "FOLDER", "OUT"}
_NEED_A_LIVING_RUN = ("stop", "stacks")


class _Runs(click.types.StringParamType):
    """Completes the names of the runs below the current folder, the newest first."""

    name = "run"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem[str]]:
        """Return the names; folders too where one may stand, or where a path has been begun."""
        known = find_runs(Path(DEFAULT_FOLDER))[::-1]
        if ctx.command.name in _NEED_A_LIVING_RUN:
            newest = known[:1]
            known = [each for each in known if each.state == "running"]
            last = known[:1] == newest and bool(known)
        else:
            last = bool(known)
        items = [CompletionItem("last", help="the newest run")] if last else []
        items += [CompletionItem(each.name, help=each.state) for each in known]
        labels = dict.fromkeys(each.record.name for each in known if each.record.name)
        items += [CompletionItem(label, help="the newest run with this name") for label in labels]
        found = [item for item in items if item.value.startswith(incomplete)]
        if "/" in incomplete or _words(param) & _FOLDERS:
            # bash's script forgets what stands before an item of this kind
            found.insert(0, CompletionItem(incomplete, type="dir"))
        return found


def complete(instruction: str) -> int:
    """Print what the shell asks for, `bash_source` or `bash_complete`; return the exit code."""
    name, _, wanted = instruction.partition("_")
    kind = get_completion_class(name) if name in _SHELLS else None
    if kind is None or wanted not in ("source", "complete"):
        raise click.UsageError(
            f"unknown completion {instruction!r}; use bash_source, zsh_source or fish_source"
        )
    shell = kind(run, {}, "zlaunch", "_ZLAUNCH_COMPLETE")
    if wanted == "source":
        click.echo(shell.source(), nl=False)
        return 0
    try:
        words, incomplete = shell.get_completion_args()
    except (KeyError, ValueError):
        raise click.UsageError(
            f"{instruction} is called by the shell, which sets COMP_WORDS and COMP_CWORD"
        ) from None
    for item in _items(kind, words, incomplete):
        click.echo(shell.format_completion(item))
    return 0


def _items(kind: type[ShellComplete], words: list[str], incomplete: str) -> list[CompletionItem[str]]:
    """Return how a line may go on after these words."""
    if words[:1] == ["help"]:
        return _commands(words[1:], incomplete)
    if words[:1] == [RUN]:
        words = words[1:]  # `zlaunch run X` means `zlaunch X`
        is_first = False
    else:
        is_first = not words
    command, parent, rest = _command_of(words)
    if command is run:
        run.params += torchrun_flags()  # not shown, but the words after them are to be understood
    for parameter in command.params:
        _set_type(parameter)
    if _has_script(command, parent, rest):
        return [CompletionItem(incomplete, type="file")]  # all that follows is the script's
    if incomplete.startswith("--"):  # options are offered with underscores
        incomplete = f"--{incomplete[2:].replace('-', '_')}"
    shell = kind(command, {"parent": parent}, command.name or "", "_ZLAUNCH_COMPLETE")
    found = shell.get_completions(rest, incomplete)
    return [*found, *_commands([], incomplete)] if is_first and not incomplete.startswith("-") else found


def _command_of(words: Sequence[str]) -> tuple[click.Command, click.Context | None, list[str]]:
    """Return the command that the words name, the context of its group, and the words after its name."""
    if not words or words[0] not in SUBCOMMANDS:
        return run, None, list(words)
    command = load(words[0])
    parent = None
    rest = list(words[1:])
    while isinstance(command, click.Group) and rest and rest[0] in command.commands:
        parent = click.Context(command, parent, info_name=command.name, **command.context_settings)
        command = command.commands[rest.pop(0)]
    return command, parent, rest


def _commands(words: Sequence[str], incomplete: str) -> list[CompletionItem[str]]:
    """Return the commands below the one that the words name."""
    if words:
        command, *_ = _command_of(words)
        below = command.commands if isinstance(command, click.Group) else {}
    else:
        below = {name: load(name) for name in SUBCOMMANDS if name.startswith(incomplete)}
    found = [
        CompletionItem(name, help=each.get_short_help_str(80))
        for name, each in below.items()
        if name.startswith(incomplete)
    ]
    if not words and "help".startswith(incomplete):
        found.append(CompletionItem("help", help="Show the help of a command."))
    if not words and RUN.startswith(incomplete):
        found.append(CompletionItem(RUN, help="Run a script."))
    return found


def _words(parameter: click.Parameter) -> set[str]:
    """Return the words in capitals of what the help shows as the parameter's value."""
    shown = parameter.metavar or (parameter.name or "").upper() * isinstance(parameter, click.Argument)
    return set(re.findall(r"[A-Z]+", shown))


def _set_type(parameter: click.Parameter) -> None:
    """Give a parameter the type that knows its values, where the metavar says so."""
    words = _words(parameter)
    if "RUN" in words:
        parameter.type = _Runs()
    elif words & _FILES:
        parameter.type = click.Path()
    elif words & _FOLDERS:
        parameter.type = click.Path(file_okay=False)
    elif re.fullmatch(r"\[[a-z|]+\]", parameter.metavar or ""):
        parameter.type = click.Choice((parameter.metavar or "").strip("[]").split("|"))


def _has_script(command: click.Command, parent: click.Context | None, words: Sequence[str]) -> bool:
    """Tell whether the words name a script already, for an argument that takes all the rest."""
    rest = [each.name for each in command.params if isinstance(each, click.Argument) and each.nargs == -1]
    with command.make_context(command.name, list(words), parent, resilient_parsing=True) as context:
        return any(context.params.get(name or "") for name in rest)
