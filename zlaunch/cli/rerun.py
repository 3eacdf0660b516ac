"""`zlaunch rerun`: start the command of a recorded run again."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from zlaunch.cli.commands import RUN, SETTINGS, Command
from zlaunch.errors import LaunchError
from zlaunch.plan.options import python_there
from zlaunch.plan.plan import NOT_SHOWN, secret_word
from zlaunch.runtime.trust import Folder
from zlaunch.supervisor import run_folder
from zlaunch.supervisor.found_runs import FoundRun, find_run, meant
from zlaunch.supervisor.provenance import PROVENANCE, VERSION

_OF_ONE_RUN = ("run_dir", "run_id", "parent", "first_attempt")
"""Options with a value that a new run must not share with the old one, also under their other names."""
_FILES = ("hostfile", "ssh_config")
_FUNCTION_CALL = "zlaunch.node.function_call"


@click.command(
    cls=Command,
    context_settings={**SETTINGS, "allow_interspersed_args": False},
    short_help="Start the command of a run again.",
)
@click.option("--dry_run", is_flag=True, help="Print what would run and start nothing.")
@click.argument("run", metavar="RUN")
@click.argument("more", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]...")
def rerun(dry_run: bool, run: str, more: tuple[str, ...]) -> int:
    """Start RUN's command again in the same folder, with the same options. ARGS go to the script after its
    own arguments.

    The new run gets a folder of its own, and starts at once even if RUN was queued. Environment variables are
    those of this shell. A warning names each difference in the git commit, the uncommitted changes, the
    untracked files, the packages and the script.
    """
    if any(word.replace("-", "_") == "__dry_run" for word in more):
        raise click.UsageError("--dry_run goes before RUN: everything after RUN goes to the script")
    found = find_run(meant(run))
    recorded = _read(found)
    if not os.path.isdir(recorded.cwd):
        raise LaunchError(f"{found.name} ran in {recorded.cwd}, which is gone")
    folder = found.path.absolute()
    os.chdir(recorded.cwd)
    line = _parse(recorded.words)
    _check(found.name, folder, recorded, line)
    words = (*line.options, *line.command, *more)
    from zlaunch.supervisor.code_changes import find_changes

    python = python_there(line.given["venv"], line.given["remote_python"])
    for change in find_changes(folder, recorded.known, python):
        print(f"zlaunch: warning: {change}", file=sys.stderr)
    if dry_run:
        print(f"cd {shlex.quote(recorded.cwd)}")
        print(shlex.join(["zlaunch", *words]))
        return 0
    from zlaunch.cli.run import run as launch

    sys.argv[1:] = words  # as it is recorded
    code: int = launch.main(args=list(words), prog_name="zlaunch", standalone_mode=False)
    return code


class _Recorded(NamedTuple):
    """Holds what the record has of a command."""

    words: tuple[str, ...]
    cwd: str
    known: dict[str, Any]


class _Line(NamedTuple):
    """Holds a command line that has been parsed."""

    options: tuple[str, ...]
    """The words before the script, without those of one run alone."""
    command: tuple[str, ...]
    given: dict[str, Any]


def _read(run: FoundRun) -> _Recorded:
    """Read the record of a run. Raises LaunchError."""
    known = run_folder.read_json(run.path / PROVENANCE)
    words = known.get("command")
    cwd = known.get("cwd")
    if not known and not os.path.lexists(run.path / PROVENANCE):
        line = shlex.join(["zlaunch", *run.record.command])
        raise LaunchError(
            f"{run.name} has no {PROVENANCE}: an older zlaunch started it, or it never began. "
            f"Its command was: {line}"
        )
    if known.get("version") != VERSION and "version" in known:
        raise LaunchError(f"{run.path / PROVENANCE}: use zlaunch {known.get('zlaunch')}, which wrote it")
    if not _is_line(words) or not isinstance(cwd, str):
        raise LaunchError(f"{run.path / PROVENANCE} cannot be read{_why_unread(run.path)}")
    return _Recorded(tuple(words or ()), cwd, known)


def _why_unread(run_dir: Path) -> str:
    """Return why the record cannot be opened; empty where it can."""
    try:
        with Folder(run_dir) as folder:
            folder.open(PROVENANCE).close()
    except OSError as error:
        return f": {error.strerror}"
    return ""


def _is_line(words: Any) -> bool:
    return isinstance(words, list) and bool(words) and all(isinstance(word, str) for word in words)


def _parse(words: Sequence[str]) -> _Line:
    """Split a command line at its script. Raises click.UsageError."""
    from zlaunch.cli.run import run as launch

    words = words[1:] if words[0] == RUN else words
    with launch.make_context("zlaunch", list(words)) as context:
        command = tuple(context.params["command"])
        given = dict(context.params)
    takes_value = {
        name.lstrip("-").replace("-", "_")
        for option in launch.params
        if isinstance(option, click.Option) and not option.is_flag and not option.count
        for name in option.opts
    }
    of_one_run = {name for option in _OF_ONE_RUN for name in _names(option)}
    options: list[str] = []
    rest = iter(words[: len(words) - len(command)])
    for word in rest:
        name, sign, _ = word.partition("=")
        known = _full_name(name, takes_value)
        # A value is no option, whatever it looks like: `--tag parent`.
        pair = [word, *([next(rest, "")] if known in takes_value and not sign else ())]
        if known not in of_one_run:
            options += pair
    return _Line(tuple(options), command, given)


def _names(option: str) -> list[str]:
    """Return the names of an option without dashes: zlaunch's, and the flags of other launchers for it."""
    from zlaunch.cli.flags import SAME
    from zlaunch.cli.run import run as launch

    own = next(each.opts for each in launch.params if each.name == option)
    return [name.lstrip("-") for name in own] + [flag for flag, ours in SAME.items() if ours == option]


def _full_name(word: str, takes_value: Collection[str]) -> str:
    """Return the name of an option without dashes, also of one that is abbreviated as argparse allows."""
    name = word.lstrip("-").replace("-", "_")
    longer = [each for each in takes_value if each.startswith(name)]
    return longer[0] if word.startswith("--") and name not in takes_value and len(longer) == 1 else name


def _hidden(words: Sequence[str], at: int) -> str:
    """Return which argument is not recorded as it was, and why."""
    shown = words[at]
    if shown == NOT_SHOWN:
        before = words[max(0, at - 1)]
        shown = before if before.startswith("-") else f"the argument after {before}"
    if word := secret_word(shown.partition(NOT_SHOWN)[0]):
        return f"{shown} (its name has {word!r})"
    return f"{shown} (its value looks like a token, or a variable with a secret name has it)"


def _check(name: str, folder: Path, recorded: _Recorded, line: _Line) -> None:
    """Refuse what cannot be run again. Raises LaunchError."""
    if line.given["module"] and line.command[:1] == (_FUNCTION_CALL,):
        raise LaunchError(f"{name} is a function that a Python program launched: run that program again")
    words = recorded.words
    if secret := [_hidden(words, at) for at, word in enumerate(words) if NOT_SHOWN in word]:
        full = shlex.join(["zlaunch", *line.options, *line.command])
        raise LaunchError(
            f"{name}: the secrets of its command line are not recorded: {', '.join(secret)}. "
            f"Fill them in and run it yourself: cd {shlex.quote(recorded.cwd)} && {full}"
        )
    for option in (name for file in _FILES for name in _names(file)):
        path = line.given.get(option)
        if path not in (None, "None") and not os.path.exists(path):
            raise LaunchError(f"{name} used --{option} {path}, which is gone from {recorded.cwd}")
    workdir = line.given["workdir"] or recorded.cwd
    is_script = not line.given["module"] and not line.given["no_python"]
    if is_script and os.path.isdir(workdir) and not os.path.exists(script := Path(workdir, line.command[0])):
        about = recorded.known.get("script")
        copy = folder / str(about.get("copy") if isinstance(about, dict) else "")
        advice = f"; its copy is {copy}" if copy.is_file() else ""
        raise LaunchError(f"{name} ran the script {script}, which is gone{advice}")
