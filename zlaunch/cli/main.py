"""The `zlaunch` command: a known subcommand name first, otherwise a script to run."""

from __future__ import annotations

import errno
import importlib
import os
import resource
import signal
import sys
from collections.abc import Sequence

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
"""Subcommand -> `module:attribute` of its click command, imported only when it is called."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; every user error is one line and code 2."""
    if signal.getsignal(signal.SIGINT) in (signal.SIG_DFL, signal.SIG_IGN):  # ignored behind a script's `&`
        signal.signal(signal.SIGINT, signal.default_int_handler)
    args = list(sys.argv[1:] if argv is None else argv)
    name = "zlaunch"
    try:
        _check_folder()
        if args and args[0] in SUBCOMMANDS:
            name = f"zlaunch {args[0]}"
            module, _, attribute = SUBCOMMANDS[args.pop(0)].partition(":")
            command: click.Command = getattr(importlib.import_module(module), attribute)
        else:
            from zlaunch.cli.run import run as command
        result = command.main(args=args, prog_name=name, standalone_mode=False)
        code = result if isinstance(result, int) else 0
    except click.exceptions.Exit as stop:
        code = stop.exit_code
    except click.ClickException as error:
        print(f"{name}: error: {error.format_message()}", file=sys.stderr)
        code = error.exit_code if error.exit_code != 1 else 2
    except (click.Abort, KeyboardInterrupt):
        code = 130
    except BrokenPipeError:
        code = 141
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        print(f"{name}: error: too many open files: the limit is {limit}; ulimit -n 4096", file=sys.stderr)
        code = 2
    return _flushed(code)


def _check_folder() -> None:
    try:
        os.getcwd()
    except OSError as error:
        text = (
            f"the current folder cannot be used ({error.strerror}): it may have been deleted; cd to another"
        )
        raise click.ClickException(text) from None


def _flushed(code: int) -> int:
    """Flush here, where a reader that has gone (`zlaunch ... | head`) can be passed over in silence."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except (OSError, ValueError) as error:
        if not isinstance(error, BrokenPipeError):
            print(f"zlaunch: error: cannot write to stdout: {error}", file=sys.stderr)
            code = code or 1
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return code
