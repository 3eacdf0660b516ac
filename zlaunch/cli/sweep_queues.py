"""Have the trials of a sweep run by zlaunch's own queue, or as a job array of SLURM's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import click

from zlaunch.cli.run import prepare
from zlaunch.cli.submit import Asked, batch_of, enqueue


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
        from zlaunch.queue.store import Store
        from zlaunch.queue.wake import queue_folder
        from zlaunch.supervisor import run_record

        self._folder = queue_folder()
        self._store = Store(self._folder)
        known = {job.submission.run_dir for job in self._store.jobs("waiting", "running", "ended")}
        for path in folder.resolve().glob("*/launcher.json"):
            record = run_record.read(path.parent)
            is_marked = record is not None and not record.pid and run_record.is_queued(path.parent)
            if is_marked and str(path.parent) not in known:  # a sweep was killed before it was in the queue
                path.unlink()

    def check(self, asked: Asked) -> None:
        prepare(asked.command, dict(asked.given))

    def submit(self, asked: Asked, trials: Mapping[int, Asked]) -> None:
        from zlaunch.queue.wake import ensure_daemon

        for each in trials.values():
            enqueue(each)
            ensure_daemon(self._folder)

    def find(self) -> None:
        pass

    def look(self) -> None:
        pass

    def standing(self, folder: Path) -> str:
        from zlaunch.queue.ending import settle
        from zlaunch.supervisor import run_record
        from zlaunch.supervisor.found_runs import FoundRun

        known = run_record.read(folder)
        if known is None:
            return "new"
        state = settle(FoundRun(folder.name, folder, known)).state
        if not state.startswith(("ended", "gone")):
            return state
        code = (run_record.read(folder) or known).exit_code  # as it has been settled
        if code is None and (job := self._store.of_run(folder)) is not None:  # it could not be written
            if job.state != "ended":
                return "running"
            code = job.exit_code
        return f"ended {'killed' if code is None else code}"

    def cancel(self, folder: Path) -> None:
        from zlaunch.queue.ending import cancel_job
        from zlaunch.queue.wake import wake

        if (job := self._store.of_run(folder)) is not None:
            cancel_job(self._store, job)
            wake(self._folder)


class SlurmQueue:
    """Runs trials as tasks of job arrays of SLURM's."""

    def __init__(self, folder: Path, digits: int, at_once: int | None) -> None:
        from zlaunch.sweep.job_array import JobArray

        if "\\" in str(folder.resolve()):
            raise click.UsageError(f"--dir {folder}: SLURM takes no backslash in the name of a job's output")
        self._array, self._at_once = JobArray(folder, digits), at_once
        self.find, self.look = self._array.find, self._array.look
        self.standing, self.cancel = self._array.standing, self._array.cancel

    def check(self, asked: Asked) -> None:
        for option in " ".join(asked.about["sbatch"]).split():
            if option.startswith(("--array", "-a", "--output", "-o", "--comment", "-J", "--job-name")):
                raise click.UsageError(f"--sbatch {option!r}: a sweep's job array has its own")
        batch_of(asked)

    def submit(self, asked: Asked, trials: Mapping[int, Asked]) -> None:
        if trials:
            commands = {number: batch_of(_in_folder(each)) for number, each in trials.items()}
            job = self._array.submit(batch_of(asked), commands, self._at_once)
            click.echo(f"job {job} of SLURM: zlaunch cancel {job} takes out all of it")


def _in_folder(asked: Asked) -> Asked:
    """Return a command line that says where its run's files go."""
    return asked._replace(options=(*asked.options, ("run_dir", f"--run_dir={asked.given['run_dir']}")))
