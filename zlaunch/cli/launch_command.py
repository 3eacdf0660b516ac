"""Make the command that launches: its short and long help, and the flags of other launchers."""

from __future__ import annotations

import inspect

import click

from zlaunch.cli.commands import SHORT, Command, Option, command_groups, load, option

OTHER_FLAGS = "nnodes"
"""One of the flags of other launchers: where it is among the parameters, they all are."""
_HELP = "Help"
_HELP_ALL = "zlaunch.help_all"
"""Key of a context's meta: the help lists all options of a launch."""


def _show_all(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    """Print the long help and exit."""
    if value and not context.resilient_parsing:
        context.meta[_HELP_ALL] = True
        click.echo(context.get_help())
        context.exit()


help_all_option = option(
    "--help_all",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_all,
    help="Show all options and exit.",
)
"""Adds the option that prints the long help."""


class LaunchCommand(Command):
    """Launches a script. Its help lists the subcommands; it also accepts the flags of other launchers."""

    lists_launch_options = True

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments. Only where an option is unknown, add the flags of other launchers, which takes
        6 ms, and then complete abbreviated names, which argparse accepts and click does not.
        """
        words = list(args)
        while True:
            try:
                return super().parse_args(context, list(words))
            except click.NoSuchOption as error:
                if self._add_other_flags():
                    continue
                from zlaunch.cli.other_words import spelled_out

                longer = spelled_out(words, error)
                if longer is None:
                    raise
                words = longer

    def _add_other_flags(self) -> bool:
        """Add the flags of other launchers. Return whether they were missing."""
        if any(parameter.name == OTHER_FLAGS for parameter in self.params):
            return False
        from zlaunch.cli.flags import torchrun_flags

        self.params += torchrun_flags()
        return True

    def format_help_text(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write what the command does: the first paragraph, in the long help all."""
        text = inspect.cleandoc(self.help or "")
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(text if _HELP_ALL in context.meta else text.partition("\n\n")[0])

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the common options; in the long help all of them, in groups."""
        if _HELP_ALL not in context.meta:
            context.meta[SHORT] = True
            common = [each for each in self.params if isinstance(each, Option) and each.common]
            rows = [each.get_help_record(context) for each in common]
            rows.append(("-h, --help, --help_all", "Show this help, or all options."))
            with formatter.section("Options"):
                formatter.write_dl([row for row in rows if row is not None])
            return
        self._add_other_flags()
        found: dict[str, list[tuple[str, str]]] = {}
        for each in self.get_params(context):
            record = each.get_help_record(context) if isinstance(each, click.Option) else None
            if record is not None:
                title = each.group if isinstance(each, Option) and each.group else _HELP
                found.setdefault(title, []).append(record)
        found[_HELP] = found.pop(_HELP)  # as the last
        for title, records in found.items():
            with formatter.section(title):
                formatter.write_dl(records)

    def format_epilog(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the subcommands, and in the long help what each does and the command's own epilog."""
        groups = list(command_groups())
        if _HELP_ALL not in context.meta:
            with formatter.section("Commands (zlaunch COMMAND -h shows the options of one)"):
                formatter.write_dl([(title, ", ".join(names)) for title, names in groups])
            return
        for title, names in groups:
            with formatter.section(f"Commands: {title}"):
                formatter.write_dl([(f"zlaunch {name}", load(name).get_short_help_str(80)) for name in names])
        super().format_epilog(context, formatter)
