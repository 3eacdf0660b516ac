"""`zlaunch sweep`: try many values of a script's parameters, by runs of the queue."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import click

from zlaunch.cli.commands import SETTINGS, Command
from zlaunch.cli.run import prepare
from zlaunch.cli.submit import Asked, batch_of, enqueue, read_line, submit
from zlaunch.errors import LaunchError

if TYPE_CHECKING:
    from zlaunch.sweep.space import SweepSpace
    from zlaunch.sweep.trials import SweepTrial


# -- sweep queues -----------------------------------------------------------------------------------
#
# Have the trials of a sweep run by zlaunch's own queue, or as a job array of SLURM's.


class TrialQueue(Protocol):
    """Runs trials: a run is known by its folder."""

    def check(self, asked: Asked) -> None:
        """Refuse a command line that cannot run. Raises click.UsageError and LaunchError."""

    def submit(self, asked: Asked, trials: Mapping[int, Asked]) -> None:
        """Queue trials, by number; `asked` is the command line that they have in common."""

    def find(self) -> None:
        """Find the trials that it has already. Raises LaunchError."""

    def look(self) -> None:
        """Find out how the trials stand by now."""

    def standing(self, folder: Path) -> str:
        """Return `new`, `queued`, `running`, or `ended` and the exit code, or a word where there is none."""

    def cancel(self, folder: Path) -> None:
        """End a trial that waits or runs. Raises LaunchError."""


class LocalQueue:
    """Runs trials by zlaunch's own queue."""

    def __init__(self, folder: Path) -> None:
        from zlaunch.queue.daemon import queue_folder
        from zlaunch.queue.store import Store
        from zlaunch.supervisor import run_folder

        self._folder = queue_folder()
        self._trials = folder
        self._store = Store(self._folder)
        self._known = self._store.states_under(folder)
        """Folder of a trial -> how its job stood at the last look: one question for all of them."""
        self._ended: dict[Path, str] = {}
        """How trials ended that the queue has forgotten."""
        for path in folder.resolve().glob("*/launcher.json"):
            record = run_folder.read(path.parent)
            is_marked = record is not None and not record.pid and run_folder.is_queued(path.parent)
            if is_marked and str(path.parent) not in self._known:
                path.unlink()  # a sweep was killed before it was in the queue

    def check(self, asked: Asked) -> None:
        prepare(asked.command, dict(asked.given))

    def submit(self, asked: Asked, trials: Mapping[int, Asked]) -> None:
        from zlaunch.queue.daemon import ensure_daemon

        for each in trials.values():
            enqueue(each)
            ensure_daemon(self._folder)

    def find(self) -> None:
        for path, (state, _) in self._known.items():
            if state != "ended" and Path(path).parent == self._trials.resolve() and not _has_record(path):
                job = self._store.of_run(Path(path))
                number = path if job is None else job.id
                raise LaunchError(
                    f"{path} was removed, but job {number} of the queue belongs to it: first "
                    f"`zlaunch cancel {number}`"
                )

    def look(self) -> None:
        from zlaunch.queue.daemon import settle_queue

        settle_queue(self._store, self._folder)
        self._known = self._store.states_under(self._trials)

    def standing(self, folder: Path) -> str:
        if (known := self._known.get(str(folder))) is None:
            return self._ended.get(folder) or self._standing_alone(folder)
        state, code = known
        if state == "ended" and not _has_record(folder):
            return "new"  # the user has removed the folder to run the trial again
        return {"waiting": "queued", "running": "running"}.get(state, f"ended {code}")

    def _standing_alone(self, folder: Path) -> str:
        """Return how a trial stands that is not in the queue, by its folder."""
        from zlaunch.queue.daemon import settle
        from zlaunch.supervisor import run_folder
        from zlaunch.supervisor.found_runs import FoundRun

        record = run_folder.read(folder)
        if record is None:
            return "new"
        found = settle(FoundRun(folder.name, folder, record))
        if not found.has_ended:
            return found.state
        code = found.record.exit_code
        self._ended[folder] = f"ended {'killed' if code is None else code}"
        return self._ended[folder]

    def cancel(self, folder: Path) -> None:
        from zlaunch.queue.daemon import cancel_job, wake

        if (job := self._store.of_run(folder)) is not None:
            cancel_job(self._store, job)
            wake(self._folder)


def _has_record(folder: Path | str) -> bool:
    """Return whether a run's folder has its record, which is there before the run is queued."""
    return Path(folder, "launcher.json").exists()


class SlurmQueue:
    """Runs trials as tasks of job arrays of SLURM's."""

    def __init__(self, folder: Path, digits: int, at_once: int | None) -> None:
        from zlaunch.sweep.job_array import JobArray

        if "\\" in str(folder.resolve()):
            raise click.UsageError(f"--dir {folder}: SLURM allows no backslash in the name of a job's output")
        self._array = JobArray(folder, digits)
        self._at_once = at_once
        self.find = self._array.find
        self.look = self._array.look
        self.standing = self._array.standing
        self.cancel = self._array.cancel

    def check(self, asked: Asked) -> None:
        for option in " ".join(asked.about["sbatch"]).split():
            if option.startswith(("--array", "-a", "--output", "-o", "--comment", "-J", "--job-name")):
                raise click.UsageError(f"--sbatch {option!r}: the sweep sets this option itself")
        batch_of(asked)

    def submit(self, asked: Asked, trials: Mapping[int, Asked]) -> None:
        if trials:
            commands = {number: batch_of(_in_folder(each)) for number, each in trials.items()}
            job = self._array.submit(batch_of(asked), commands, self._at_once)
            click.echo(f"job {job} of SLURM: zlaunch cancel {job} takes out all of it")


def _in_folder(asked: Asked) -> Asked:
    """Return a command line that says where its run's files go."""
    return asked._replace(options=(*asked.options, ("run_dir", f"--run_dir={asked.given['run_dir']}")))


# -- sweep ------------------------------------------------------------------------------------------


_SETTINGS = {**SETTINGS, "ignore_unknown_options": True, "allow_interspersed_args": False}
_POLL_S = 1.0
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
    from zlaunch.sweep.space import read_space
    from zlaunch.sweep.trials import digits_of, hold, open_trials

    if file.startswith("-"):
        raise click.UsageError(f"expected the parameter file before the launch options, got {file}")
    context = _line(command)
    folder = folder if context.params["folder"] is None else context.params["folder"]
    at_once = at_once if context.params["at_once"] is None else context.params["at_once"]
    asked = _asked(context)
    space = read_space(Path(file))
    where = Path(folder if folder is not None else f"sweeps/{Path(file).stem}")
    config = _config_of(asked, space)
    if at_once is not None and asked.queue != "slurm":
        raise click.UsageError(
            "--at_once needs --queue slurm; elsewhere, a hostfile with `localhost slots=N` limits trials"
        )
    hold(where)
    queue: TrialQueue
    if asked.queue == "slurm":
        queue = SlurmQueue(where, digits_of(space.trials), at_once)
    else:
        queue = LocalQueue(where)
    queue.find()
    trials = open_trials(where, space, command, queue.standing, asked.queue, compared=_compared)
    running = _Sweep(where, space, trials, queue)
    try:
        running.begin(asked, config)
        running.follow()
    except KeyboardInterrupt:
        click.echo("\nzlaunch sweep: its runs stay in the queue; the same command goes on", err=True)
        running.show(so_far=True)
        return 130
    running.show()
    return 0 if any(trial.state == "done" and trial.last is not None for trial in trials) else 1


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


def _asked(context: click.Context) -> Asked:
    """Take the parsed command line behind FILE. Raises click.UsageError."""
    given = {name: value for name, value in context.params.items() if name not in _OWN}
    asked = read_line(context, given.pop("command"), given.pop("chosen_queue"), given)
    asked = asked._replace(options=tuple(each for each in asked.options if each[0] not in _OWN))
    if not asked.command:
        raise click.UsageError("no script given; see zlaunch sweep --help")
    if asked.given["run_dir"] is not None:
        raise click.UsageError("--run_dir cannot be used with sweep: use --dir DIR")
    return asked


def _config_of(asked: Asked, space: SweepSpace) -> str | None:
    """Return the config whose keys the sweep changes, as it is named; None if it changes none."""
    from zlaunch.plan.checks import config_arguments

    keys = [name for name in space.trials[0] if not name.startswith("--")]
    if not keys:
        return None
    configs = {value for _, value, _ in config_arguments(asked.command[1:])}
    if len(configs) != 1:
        raise click.UsageError(
            f"parameter {keys[0]} is a config key, but {asked.command[0]} gets no config: pass "
            "--config, --deepspeed_config or --deepspeed with a .json, .yaml or .yml file"
        )
    return configs.pop()


class _Sweep:
    """Puts trials into the queue, follows them, and says what they show."""

    def __init__(
        self, folder: Path, space: SweepSpace, trials: Sequence[SweepTrial], queue: TrialQueue
    ) -> None:
        from zlaunch.sweep.trials import SuccessiveHalving

        self.folder = folder
        self.space = space
        self.trials = trials
        self.queue = queue
        self.has_warned = self.has_failed_to_stop = False
        rules = space.early_stopping
        self.halving = None if rules is None else SuccessiveHalving(rules, space.goal)

    def begin(self, asked: Asked, config: str | None) -> None:
        """Put every trial that is not there yet into the queue."""
        self.queue.look()
        path = None if config is None else os.path.join(asked.given["workdir"] or "", config)
        raw = None if path is None else _load(path, self.space)
        new = {
            trial.number: _of_trial(asked, trial, config, raw) for trial in self.trials if not trial.is_begun
        }
        for each in new.values():  # before anything is queued
            self.queue.check(each)
        self.queue.submit(asked, new)
        known = len(self.trials) - len(new)
        click.echo(f"{len(self.trials)} trials in {self.folder}" + f", {known} known" * bool(known))

    def follow(self) -> None:
        """Wait for all trials; stop those that are behind."""
        from zlaunch.sweep.trials import write_results

        left = list(self.trials)
        while True:
            self.queue.look()
            before = len(left)
            for trial in list(left):
                state = trial.state
                if state == "queued":
                    continue
                # Asked first: what comes afterwards is still read.
                has_ended = trial.has_ended or state == "new"
                new = trial.read()
                is_behind = self.halving is not None and not self.halving.goes_on(trial.number, new)
                if has_ended:
                    left.remove(trial)
                    click.echo(f"{trial.number:3d}  {_shown(trial.values)}: {_outcome(trial)}")
                    self._miss_metric(trial)
                elif is_behind and not trial.is_stopped:
                    self._stop(trial)
            if len(left) < before:
                write_results(self.folder, self.trials)
            if not left:
                return
            time.sleep(_POLL_S)

    def _stop(self, trial: SweepTrial) -> None:
        """Stop a trial that is behind; where SLURM does not answer, the next look tries again."""
        from zlaunch.slurm.environment import SlurmError

        try:
            self.queue.cancel(trial.folder)
        except SlurmError as error:
            if not self.has_failed_to_stop:
                click.echo(f"zlaunch sweep: warning: {error}; it is tried again", err=True)
            self.has_failed_to_stop = True
            return
        trial.stop()

    def _miss_metric(self, trial: SweepTrial) -> None:
        """Say it once when a trial has come to its end without the metric."""
        if trial.last is None and trial.state == "done" and not self.has_warned:
            self.has_warned = True
            metric = self.space.metric
            reported = f"; it has reported {', '.join(sorted(trial.reported))}" if trial.reported else ""
            text = f"trial {trial.number} has not reported {metric!r}, by which trials are compared{reported}"
            click.echo(f"zlaunch sweep: warning: {text}", err=True)

    def show(self, *, so_far: bool = False) -> None:
        """Print the trials, the best first; `so_far`: there is more to come."""
        from zlaunch.cli.tables import make_table, stdout_console
        from zlaunch.sweep.trials import ranked, write_results

        write_results(self.folder, self.trials)
        order = ranked(self.trials, self.space.goal)
        rows = [
            (
                *(str(trial.number), _shown(trial.values), "" if trial.last is None else f"{trial.last:.6g}"),
                *(f"{trial.step:g}", trial.state),
            )
            for trial in order
        ]
        columns = ("trial", "values", self.space.metric, "step", "state")
        stdout_console().print(make_table(columns, rows, right=(self.space.metric, "step")))
        best = order[0]
        click.echo(f"{self.folder / 'results.csv'}: all results")
        if best.last is not None:
            click.echo(
                f"best{' so far' * so_far}: trial {best.number}, {_shown(best.values)}: "
                f"{self.space.metric} {best.last:.6g}"
            )
        elif not so_far:
            failed = [trial for trial in self.trials if trial.state.startswith("failed")]
            if len(failed) == len(self.trials):
                click.echo(f"every trial has failed; the first: {_reason(failed[0])}")
                click.echo("to run a failed trial again, remove its folder and repeat the command")
                return
            click.echo(
                f"no trial has reported {self.space.metric!r}: zlaunch.report({self.space.metric}=...) does"
            )


def _reason(trial: SweepTrial) -> str:
    """Return the first failure in a trial's events; without one, where its logs are."""
    from zlaunch.supervisor import run_folder
    from zlaunch.supervisor.run_files import EventFile
    from zlaunch.view.progress import RunProgress

    failures: list[str] = []
    record = run_folder.read(trial.folder)
    progress = RunProgress() if record is None else RunProgress(record.shown)
    with contextlib.suppress(OSError):
        failures = progress.take_all(EventFile(trial.folder / "events.jsonl").read()).failures
    return failures[0] if failures else f"{trial.state}, see `zlaunch logs {trial.folder}` and its files"


def _of_trial(asked: Asked, trial: SweepTrial, config: str | None, raw: Mapping[str, Any] | None) -> Asked:
    """Return the command line of a trial; write its config."""
    from zlaunch.sweep.trials import CONFIG, as_arguments, with_values
    from zlaunch.tuning.trial import replace_config

    command = list(asked.command)
    keys = {name: value for name, value in trial.values.items() if not name.startswith("--")}
    if config is not None and raw is not None:
        path = trial.folder / CONFIG
        path.write_text(json.dumps(with_values(raw, keys), indent=1) + "\n")
        command = replace_config(command, config, str(path))
    command += as_arguments({name: value for name, value in trial.values.items() if name not in keys})
    return asked._replace(command=tuple(command), given={**asked.given, "run_dir": str(trial.folder)})


def _load(path: str, space: SweepSpace) -> dict[str, Any]:
    """Read the config whose keys a sweep changes; warn of those that only the script can know."""
    from zlaunch.runtime.config import ConfigError, load
    from zlaunch.sweep.trials import with_values

    try:
        raw = load(path).raw
    except ConfigError as error:
        raise LaunchError(str(error)) from None
    keys = {name: value for name, value in space.trials[0].items() if not name.startswith("--")}
    try:
        warnings = load(with_values(raw, keys)).warnings
    except ConfigError:  # said of the trial's own
        return raw
    for name in keys:
        if any(f"{name}: unknown key" in warning for warning in warnings):
            text = f"{name} is no key of a config that zlaunch knows; an argument of the script is --{name}"
            click.echo(f"zlaunch sweep: warning: {text}", err=True)
    return raw


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
