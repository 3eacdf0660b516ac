"""List the subcommands of `zlaunch`, and import each only when it is called or shown in the help."""

from __future__ import annotations

import functools
import math
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import click

from zlaunch.errors import LaunchError

SUBCOMMANDS = {
    "attach": "zlaunch.cli.runs:attach",
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
    "rerun": "zlaunch.cli.rerun:rerun",
    "slurm": "zlaunch.cli.slurm:slurm",
    "stacks": "zlaunch.cli.runs:stacks",
    "stop": "zlaunch.cli.runs:stop",
    "submit": "zlaunch.cli.submit:submit",
    "sweep": "zlaunch.cli.sweep:sweep",
    "tune": "zlaunch.cli.tune:tune",
    "ui": "zlaunch.cli.ui:ui",
    "wait": "zlaunch.cli.runs:wait",
    "watch": "zlaunch.cli.runs:watch",
}
"""Subcommand -> `module:attribute` of its click command."""
COMMAND_GROUPS = {
    "Run": ("attach", "wait", "stop", "rerun"),
    "Watch": ("ps", "logs", "watch", "report", "ui", "stacks", "bundle"),
    "Jobs": ("submit", "queue", "cancel", "sweep"),
    "Before a run": ("init", "config", "estimate", "tune", "doctor", "bench"),
    "Clusters": ("slurm", "k8s"),
    "Checkpoints": ("checkpoint",),
}
"""Title in the help -> its subcommands. The help lists what stands in no group under the title Others."""
RUN = "run"
"""The word that may stand in front of the command line of a launch."""
SETTINGS: dict[str, Any] = {
    "token_normalize_func": lambda token: token.replace("-", "_"),
    "help_option_names": ["-h", "--help"],
    "max_content_width": 100,
}
"""Settings of every command; groups hand them on to theirs."""
SHORT = "zlaunch.short"
"""Key of a context's meta: the help lists the first name of an option alone, without its aliases."""


def load(name: str) -> click.Command:
    """Import a subcommand."""
    command: click.Command = pkgutil.resolve_name(SUBCOMMANDS[name])
    return command


def asked_for_help(words: list[str]) -> list[str]:
    """Return the arguments that show what `zlaunch help WORDS` asks for. Raises click.UsageError."""
    known = list(SUBCOMMANDS)
    command: click.Command | None = None
    if words != [RUN]:
        for word in words:
            if word not in known:
                import difflib

                near = difflib.get_close_matches(word, known, n=1)
                there = ", ".join(known) or "none below"
                choice = f"did you mean {near[0]}?" if near else f"there is {there}"
                raise click.UsageError(f"help: no command {word!r}, {choice}")
            command = command.commands[word] if isinstance(command, click.Group) else load(word)
            known = list(command.commands) if isinstance(command, click.Group) else []
    return [*words, "--help"]


def command_groups() -> Iterator[tuple[str, Sequence[str]]]:
    """Yield the titles and names of the groups of subcommands."""
    yield from COMMAND_GROUPS.items()
    grouped = {name for names in COMMAND_GROUPS.values() for name in names}
    if others := [name for name in SUBCOMMANDS if name not in grouped]:
        yield "Others", others


def message_of(error: click.ClickException) -> str:
    """Return an error's text, with the option that was meant. An integer is a whole number."""
    if isinstance(error, click.NoSuchOption):
        from zlaunch.cli.other_words import unknown_option

        return unknown_option(error)
    text = error.format_message()
    for kind, plain in (("integer", "whole number"), ("float", "number")):
        text = re.sub(rf"\bvalid {kind}( range)?\b", plain, text)
    return text


class Option(click.Option):
    """Has aliases, which short helps leave out, and may belong to a group of a launch's options.

    The first long name is the option's, the others are aliases. Only the help of a launch lists the options
    of a group; other commands that take them refer to it. There, hidden ones are listed too: the shells'
    completion does not offer them.
    """

    def __init__(self, *args: Any, group: str | None = None, common: bool = False, **more: Any) -> None:
        super().__init__(*args, **more)
        self.group = group
        self.common = common

    def get_help_extra(self, ctx: click.Context) -> Any:
        """Return what stands in brackets behind the help: not that a number is at least 1."""
        extra = super().get_help_extra(ctx)
        extra.pop("range", None)
        return extra

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return the names and the help of the option; None where the help leaves it out."""
        if self.group is not None and not getattr(ctx.command, "lists_launch_options", False):
            return None
        hidden = self.hidden
        try:
            self.hidden = hidden and self.group is None
            record = super().get_help_record(ctx)
        finally:
            self.hidden = hidden
        if record is None or SHORT not in ctx.meta:
            return record
        names, text = record
        long = [name for name in self.opts if name.startswith("--")]
        for alias in sorted(long[1:], key=len, reverse=True):
            names = names.replace(f", {alias}", "")
        return names, text


option = functools.partial(click.option, cls=Option)


def with_options(
    options: Iterable[Callable[..., Any]],
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that gives a click command these options, in this order."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(tuple(options)):
            command = option(command)
        return command

    return decorate


def count_option(*names: str, low: int = 1, high: int | None = None, **more: Any) -> Callable[..., Any]:
    """Make an option that takes a whole number."""
    return option(*names, type=click.IntRange(low, high), metavar="N", **more)


def print_name(name: str) -> None:
    """Print the name of a detached or queued run. A stdout that cannot be written causes a warning alone: the
    run has not failed.
    """
    try:
        print(name, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is buffered would fail again at exit
        print(f"zlaunch: warning: cannot write to stdout: {error.strerror}: {name} runs", file=sys.stderr)


class _Seconds(click.FloatRange):
    """Accepts a number of seconds, and rejects nan."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Read a number. Raises click.BadParameter."""
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number of seconds", param, ctx)
        return number


def seconds_option(
    name: str, text: str, *, default: float | None = None, low: int = 0, **more: Any
) -> Callable[..., Any]:
    """Make an option that takes a number of seconds; a default that is not 0 is shown."""
    kind = _Seconds(min=low)
    shown = bool(default)
    return option(name, type=kind, default=default, show_default=shown, metavar="SECONDS", help=text, **more)


class Command(click.Command):
    """Turns the errors of a launch into click's usage errors: here and nowhere else."""

    lists_launch_options = False
    """Whether the help lists the options of a launch, or only refers to them."""

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the command's own options, and where those of a launch are listed."""
        context.meta[SHORT] = True
        super().format_options(context, formatter)
        if any(isinstance(each, Option) and each.group is not None for each in self.params):
            formatter.write_paragraph()
            formatter.write_text("`zlaunch --help-all` lists the options of a launch.")

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments. Raises click.UsageError, which says what a missing run may be."""
        try:
            return super().parse_args(ctx, args)
        except click.MissingParameter as error:
            metavar = "" if error.param is None else error.param.metavar or ""
            if metavar != "RUN":
                raise
            message = (
                "missing argument RUN: give `last` for the newest run, or a name that `zlaunch ps` shows"
            )
            raise click.UsageError(message, ctx) from None

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except LaunchError as error:
            raise click.UsageError(str(error)) from None


class Group(Command, click.Group):
    """Holds subcommands whose launch errors become usage errors."""

    command_class = Command

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the subcommand. Raises click.UsageError that lists them."""
        if self.get_command(context, args[0]) is None and not args[0].startswith("-"):
            from zlaunch.cli.other_words import unknown_command

            raise click.UsageError(unknown_command(args[0], context.command_path, self.commands))
        return super().resolve_command(context, args)
