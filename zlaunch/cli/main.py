"""Run the `zlaunch` command: the subcommand that the first argument names, otherwise a script."""

from __future__ import annotations

import errno
import io
import os
import resource
import signal
import sys
from collections.abc import Sequence

import click

from zlaunch.cli.commands import RUN, SUBCOMMANDS, asked_for_help, load, message_of
from zlaunch.system.interrupts import remember_interrupts


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; every user error is one line and code 2."""
    if signal.getsignal(signal.SIGINT) in (signal.SIG_DFL, signal.SIG_IGN):  # ignored behind a script's `&`
        remember_interrupts()
    _fill_closed_descriptors()
    args = list(sys.argv[1:] if argv is None else argv)
    name = "zlaunch"
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # an old terminal shows a ? for what it has no letter for
            stream.reconfigure(errors="replace" if stream is sys.stdout else "backslashreplace")
    try:
        if asked := os.environ.get("_ZLAUNCH_COMPLETE"):
            from zlaunch.cli.completion import complete

            return _flushed(complete(asked))
        _check_folder()
        if args[:1] == ["help"]:
            args = asked_for_help(args[1:])
        if args[:1] == [RUN]:
            del args[0]  # `zlaunch run X` means `zlaunch X`
        if args and args[0] in SUBCOMMANDS:
            name = f"zlaunch {args[0]}"
            command: click.Command = load(args.pop(0))
        else:
            from zlaunch.cli.run import run as command
        result = command.main(args=args, prog_name=name, standalone_mode=False)
        code = result if isinstance(result, int) else 0
    except click.exceptions.Exit as stop:
        code = stop.exit_code
    except click.ClickException as error:
        is_help = isinstance(error, getattr(click.exceptions, "NoArgsIsHelpError", ()))  # of newer clicks
        text = error.format_message() if is_help else f"{name}: error: {message_of(error)}"
        print(text, file=sys.stderr)
        code = error.exit_code if error.exit_code != 1 else 2
    except (click.Abort, KeyboardInterrupt):
        code = 130
    except RuntimeError as error:
        # before Python 3.12, what is raised in __set_name__, as by an import, is the cause of another error
        if not isinstance(error.__cause__, KeyboardInterrupt):
            raise
        code = 130
    except BrokenPipeError:
        code = 141
    except OSError as error:
        text = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        if error.errno == errno.ENOSPC and not error.filename:
            text = f"cannot write the output: {error.strerror}"
        if error.errno in (errno.EMFILE, errno.ENFILE):
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            text = f"too many open files: the limit is {limit}; ulimit -n 4096"
        print(f"{name}: error: {text}", file=sys.stderr)
        code = 2
    return _flushed(code)


def _fill_closed_descriptors() -> None:
    """Open /dev/null where stdin, stdout or stderr are closed: the next file would be taken for them."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free, so this one


def _check_folder() -> None:
    try:
        os.getcwd()
    except OSError as error:
        text = (
            f"the current folder cannot be used ({error.strerror}): it may have been deleted; cd to another"
        )
        raise click.ClickException(text) from None


def _flushed(code: int) -> int:
    """Flush stdout and return the exit code. A reader that has gone (`zlaunch ... | head`) is no error."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except (OSError, ValueError) as error:
        if not isinstance(error, BrokenPipeError):
            print(f"zlaunch: error: cannot write to stdout: {error}", file=sys.stderr)
            code = code or 1
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return code
