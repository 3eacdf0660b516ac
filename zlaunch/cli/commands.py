"""List the subcommands of `zlaunch`, and import each only when it is called or shown in the help."""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Callable, Iterable
from typing import Any

import click

from zlaunch.errors import LaunchError

SUBCOMMANDS = {
    "attach": "zlaunch.cli.attach:attach",
    "bench": "zlaunch.cli.bench:bench",
    "bundle": "zlaunch.cli.bundle:bundle",
    "cancel": "zlaunch.cli.queue:cancel",
    "checkpoint": "zlaunch.cli.checkpoint:checkpoint",
    "config": "zlaunch.cli.config:config",
    "doctor": "zlaunch.cli.doctor:doctor",
    "estimate": "zlaunch.cli.estimate:estimate",
    "init": "zlaunch.cli.init:init",
    "k8s": "zlaunch.cli.k8s:k8s",
    "logs": "zlaunch.cli.logs:logs",
    "ps": "zlaunch.cli.runs:ps",
    "queue": "zlaunch.cli.queue:queue",
    "report": "zlaunch.cli.report:report",
    "slurm": "zlaunch.cli.slurm:slurm",
    "stacks": "zlaunch.cli.runs:stacks",
    "stop": "zlaunch.cli.runs:stop",
    "submit": "zlaunch.cli.submit:submit",
    "sweep": "zlaunch.cli.sweep:sweep",
    "tune": "zlaunch.cli.tune:tune",
    "wait": "zlaunch.cli.attach:wait",
    "watch": "zlaunch.cli.watch:watch",
}
"""Subcommand -> `module:attribute` of its click command."""
SETTINGS: dict[str, Any] = {
    "token_normalize_func": lambda token: token.replace("-", "_"),
    "help_option_names": ["-h", "--help"],
    "max_content_width": 100,
}
"""Settings of every command; groups hand them on to theirs."""
OTHER_FLAGS = "nnodes"
"""One of the flags of other launchers: where it is among the parameters, they all are."""


def load(name: str) -> click.Command:
    """Import a subcommand."""
    command: click.Command = pkgutil.resolve_name(SUBCOMMANDS[name])
    return command


def asked_for_help(words: list[str]) -> list[str]:
    """Return the arguments that show what `zlaunch help WORDS` asks for. Raises click.UsageError."""
    known = list(SUBCOMMANDS)
    command: click.Command | None = None
    for word in words:
        if word not in known:
            import difflib

            near = difflib.get_close_matches(word, known, n=1)
            choice = f"did you mean {near[0]}?" if near else f"there is {', '.join(known) or 'none below'}"
            raise click.UsageError(f"help: no command {word!r}, {choice}")
        command = command.commands[word] if isinstance(command, click.Group) else load(word)
        known = list(command.commands) if isinstance(command, click.Group) else []
    return [*words, "--help"]


def message_of(error: click.ClickException) -> str:
    """Return an error's text. It suggests the nearest option alone, and calls an integer a whole number."""
    if isinstance(error, click.NoSuchOption) and error.possibilities:
        import difflib

        best = difflib.get_close_matches(error.option_name, error.possibilities, n=1, cutoff=0)
        error = click.NoSuchOption(error.option_name, possibilities=best, ctx=error.ctx)
    text = error.format_message()
    for kind, plain in (("integer", "whole number"), ("float", "number")):
        text = re.sub(rf"\bvalid {kind}( range)?\b", plain, text)
    return text


def with_options(
    options: Iterable[Callable[..., Any]],
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that gives a click command these options, in this order."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(tuple(options)):
            command = option(command)
        return command

    return decorate


def count_option(*names: str, low: int = 1, **more: Any) -> Callable[..., Any]:
    """Make an option that takes a whole number."""
    return click.option(*names, type=click.IntRange(min=low), metavar="N", **more)


def seconds_option(name: str, text: str, *, default: float | None = None, low: int = 0) -> Callable[..., Any]:
    """Make an option that takes a number of seconds; a default that is not 0 is shown."""
    kind = click.FloatRange(min=low)
    shown = bool(default)
    return click.option(name, type=kind, default=default, show_default=shown, metavar="SECONDS", help=text)


class Command(click.Command):
    """Turns the errors of a launch into click's usage errors: here and nowhere else."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except LaunchError as error:
            raise click.UsageError(str(error)) from None


class Group(Command, click.Group):
    """Holds subcommands whose launch errors become usage errors."""


class Launch(Command):
    """Launches a script. Its help lists the subcommands; it also accepts the flags of other launchers."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments; add the flags of other launchers where one is used: that takes 6 ms."""
        try:
            return super().parse_args(context, list(args))
        except click.NoSuchOption:
            if any(parameter.name == OTHER_FLAGS for parameter in self.params):
                raise
            from zlaunch.cli.torchrun_flags import torchrun_flags

            self.params += torchrun_flags()
            return super().parse_args(context, list(args))

    def format_epilog(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of subcommands, and the command's own epilog below it."""
        with formatter.section("Other commands"):
            rows = [(f"zlaunch {name}", load(name).get_short_help_str(80)) for name in SUBCOMMANDS]
            formatter.write_dl([*rows, ("zlaunch help [COMMAND]", "Show this, or the help of a command.")])
        super().format_epilog(context, formatter)
