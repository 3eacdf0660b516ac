"""`zlaunch sweep`: try many values of a script's parameters, by runs of the queue."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from zlaunch.cli.commands import SETTINGS, Command
from zlaunch.cli.submit import batch_of, prepare_launcher, read_line, submit
from zlaunch.queue.submit import SubmitRequest

if TYPE_CHECKING:
    from zlaunch.sweep.queues import TrialQueue
    from zlaunch.sweep.search import SweepSearch
    from zlaunch.sweep.trials import SweepTrial

_SETTINGS = {**SETTINGS, "ignore_unknown_options": True, "allow_interspersed_args": False}
_OWN = ("folder", "at_once")
"""Options of a sweep itself, before or after FILE."""
_NOT_COMPARED = (*_OWN, "retries")
"""Options that may change when a sweep is resumed."""


@click.command(cls=Command, context_settings=_SETTINGS, short_help="Search a script's hyperparameters.")
@click.option(
    "--dir", "folder", metavar="DIR", help="Folder for results.  [default: sweeps/NAME, for NAME.yaml]"
)
@click.option(
    "--at_once", type=click.IntRange(1), metavar="N", help="SLURM: at most N runs at the same time."
)
@click.argument("file", metavar="FILE")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[SUBMIT OPTIONS] SCRIPT [ARGS]...")
def sweep(folder: str | None, at_once: int | None, file: str, command: tuple[str, ...]) -> int:
    """Run SCRIPT with many values of its hyperparameters and show the best.

    Each trial is a run of `zlaunch submit`, or a task of a job array in SLURM. FILE has the values: a grid or
    random samples in YAML, or rows of a CSV. A name such as --hidden is an argument of the script; a name
    such as optimizer.params.lr is a key of its config. With early_stopping, zlaunch stops trials that fall
    behind. Ctrl-C leaves queued trials in the queue. The same command resumes the sweep.
    """
    from zlaunch.sweep.queues import LocalQueue, SlurmQueue
    from zlaunch.sweep.search import SweepSearch, config_of
    from zlaunch.sweep.space import read_space
    from zlaunch.sweep.trials import digits_of, hold, open_trials

    if file.startswith("-"):
        raise click.UsageError(f"expected the parameter file before the launch options, got {file}")
    context = _line(command)
    folder = folder if context.params["folder"] is None else context.params["folder"]
    at_once = at_once if context.params["at_once"] is None else context.params["at_once"]
    request = _request_of(context)
    space = read_space(Path(file))
    where = Path(folder if folder is not None else f"sweeps/{Path(file).stem}")
    config = config_of(request.command, space)
    if at_once is not None and request.queue != "slurm":
        raise click.UsageError(
            "--at_once needs --queue slurm; elsewhere, a hostfile with `localhost slots=N` limits trials"
        )
    hold(where)
    queue: TrialQueue
    if request.queue == "slurm":
        queue = SlurmQueue(where, digits_of(space.trials), at_once, batch_of)
    else:
        queue = LocalQueue(where, prepare_launcher)
    queue.find()
    trials = open_trials(where, space, command, queue.standing, request.queue, compared=_compared)
    running = SweepSearch(where, space, trials, queue, _warn)
    try:
        if said := running.begin(request, config):
            click.echo(said)
        click.echo(f"{len(trials)} trials in {where}" + f", {running.known} known" * bool(running.known))
        for trial in running.follow():
            click.echo(f"{trial.number:3d}  {_shown(trial.values)}: {_outcome(trial)}")
    except KeyboardInterrupt:
        click.echo("\nzlaunch sweep: its runs stay in the queue; the same command goes on", err=True)
        _show(running, so_far=True)
        return 130
    _show(running)
    return 0 if any(trial.state == "done" and trial.last is not None for trial in trials) else 1


def _warn(text: str) -> None:
    click.echo(f"zlaunch sweep: warning: {text}", err=True)


def _line(words: Sequence[str]) -> click.Context:
    """Parse the command line behind FILE: options of `submit` and of the sweep. Raises click.UsageError."""
    line = copy.copy(submit)
    line.params = [*(each for each in sweep.params if each.name in _OWN), *submit.params]
    return line.make_context("zlaunch sweep", list(words))


def _compared(words: Sequence[str]) -> object:
    """Return what must stay the same in the command line behind FILE when a sweep is resumed."""
    try:
        params = _line(words).params
    except click.UsageError:  # of another version of zlaunch
        return list(words)
    return {name: value for name, value in params.items() if name not in _NOT_COMPARED}


def _request_of(context: click.Context) -> SubmitRequest:
    """Take the parsed command line behind FILE. Raises click.UsageError."""
    given = {name: value for name, value in context.params.items() if name not in _OWN}
    request = read_line(context, given.pop("command"), given.pop("chosen_queue"), given)
    request = request._replace(options=tuple(each for each in request.options if each[0] not in _OWN))
    if not request.command:
        raise click.UsageError("no script given; see zlaunch sweep --help")
    if request.given["run_dir"] is not None:
        raise click.UsageError("--run_dir cannot be used with sweep: use --dir DIR")
    return request


def _show(sweep: SweepSearch, *, so_far: bool = False) -> None:
    """Print the trials, the best first; `so_far`: there is more to come."""
    from zlaunch.cli.tables import make_table, stdout_console
    from zlaunch.sweep.search import first_failure
    from zlaunch.sweep.trials import ranked, write_results

    write_results(sweep.folder, sweep.trials)
    order = ranked(sweep.trials, sweep.space.goal)
    rows = [
        (
            *(str(trial.number), _shown(trial.values), "" if trial.last is None else f"{trial.last:.6g}"),
            *(f"{trial.step:g}", trial.state),
        )
        for trial in order
    ]
    columns = ("trial", "values", sweep.space.metric, "step", "state")
    stdout_console().print(make_table(columns, rows, right=(sweep.space.metric, "step")))
    best = order[0]
    click.echo(f"{sweep.folder / 'results.csv'}: all results")
    if best.last is not None:
        click.echo(
            f"best{' so far' * so_far}: trial {best.number}, {_shown(best.values)}: "
            f"{sweep.space.metric} {best.last:.6g}"
        )
    elif not so_far:
        failed = [trial for trial in sweep.trials if trial.state.startswith("failed")]
        if len(failed) == len(sweep.trials):
            click.echo(f"every trial has failed; the first: {first_failure(failed[0])}")
            click.echo("to run a failed trial again, remove its folder and repeat the command")
            return
        click.echo(
            f"no trial has reported {sweep.space.metric!r}: zlaunch.report({sweep.space.metric}=...) does"
        )


def _shown(values: Mapping[str, object]) -> str:
    return " ".join(f"{name}={_short(value)}" for name, value in values.items())


def _short(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _outcome(trial: SweepTrial) -> str:
    state = trial.state
    if state.startswith("failed"):
        state += f", see {os.path.relpath(trial.folder)}"
    if trial.last is None:
        return f"no {trial.metric}, {state}"
    return f"{trial.metric} {trial.last:.6g} at step {trial.step:g}, {state}"
