"""The subcommands of `zlaunch`, each imported only when it is called or listed."""

from __future__ import annotations

import difflib
import importlib
from typing import Any

import click

SUBCOMMANDS = {
    "bench": "zlaunch.cli.bench:bench",
    "checkpoint": "zlaunch.cli.checkpoint:checkpoint",
    "config": "zlaunch.cli.config:config",
    "doctor": "zlaunch.cli.doctor:doctor",
    "ps": "zlaunch.cli.runs:ps",
    "slurm": "zlaunch.cli.slurm:slurm",
    "stacks": "zlaunch.cli.runs:stacks",
    "stop": "zlaunch.cli.runs:stop",
}
"""Subcommand -> `module:attribute` of its click command."""
SETTINGS: dict[str, Any] = {
    "token_normalize_func": lambda token: token.replace("-", "_"),
    "help_option_names": ["-h", "--help"],
    "max_content_width": 100,
}
"""Of every command; groups hand them on to theirs."""


def load(name: str) -> click.Command:
    """Import a subcommand."""
    module, _, attribute = SUBCOMMANDS[name].partition(":")
    command: click.Command = getattr(importlib.import_module(module), attribute)
    return command


def asked_for_help(words: list[str]) -> list[str]:
    """Return the arguments that show what `zlaunch help WORDS` asks for. Raises click.UsageError."""
    known = list(SUBCOMMANDS)
    command: click.Command | None = None
    for word in words:
        if word not in known:
            near = difflib.get_close_matches(word, known, n=1)
            choice = f"did you mean {near[0]}?" if near else f"there is {', '.join(known) or 'none below'}"
            raise click.UsageError(f"help: no command {word!r}, {choice}")
        command = command.commands[word] if isinstance(command, click.Group) else load(word)
        known = list(command.commands) if isinstance(command, click.Group) else []
    return [*words, "--help"]


class WithSubcommands(click.Command):
    """A command whose help ends with a line for each subcommand."""

    def format_epilog(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list, and the command's own epilog below it."""
        with formatter.section("Other commands"):
            rows = [(f"zlaunch {name}", load(name).get_short_help_str(80)) for name in SUBCOMMANDS]
            formatter.write_dl([*rows, ("zlaunch help [COMMAND]", "Show this, or the help of a command.")])
        super().format_epilog(context, formatter)
