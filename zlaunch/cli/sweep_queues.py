"""Have the trials of a sweep run by zlaunch's own queue, or as a job array of SLURM's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import click

from zlaunch.cli.run import prepare
from zlaunch.cli.submit import Asked, batch_of, enqueue
from zlaunch.errors import LaunchError


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

        self._folder, self._trials = queue_folder(), folder
        self._store = Store(self._folder)
        self._known = self._store.states_under(folder)
        """Folder of a trial -> how its job stood at the last look: one question for all of them."""
        self._ended: dict[Path, str] = {}
        """How trials ended that the queue has forgotten."""
        for path in folder.resolve().glob("*/launcher.json"):
            record = run_record.read(path.parent)
            is_marked = record is not None and not record.pid and run_record.is_queued(path.parent)
            if is_marked and str(path.parent) not in self._known:
                path.unlink()  # a sweep was killed before it was in the queue

    def check(self, asked: Asked) -> None:
        prepare(asked.command, dict(asked.given))

    def submit(self, asked: Asked, trials: Mapping[int, Asked]) -> None:
        from zlaunch.queue.wake import ensure_daemon

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
        from zlaunch.queue.ending import settle_queue

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
        from zlaunch.queue.ending import settle
        from zlaunch.supervisor import run_record
        from zlaunch.supervisor.found_runs import FoundRun

        record = run_record.read(folder)
        if record is None:
            return "new"
        found = settle(FoundRun(folder.name, folder, record))
        if not found.has_ended:
            return found.state
        code = found.record.exit_code
        self._ended[folder] = f"ended {'killed' if code is None else code}"
        return self._ended[folder]

    def cancel(self, folder: Path) -> None:
        from zlaunch.queue.ending import cancel_job
        from zlaunch.queue.wake import wake

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
        self._array, self._at_once = JobArray(folder, digits), at_once
        self.find, self.look = self._array.find, self._array.look
        self.standing, self.cancel = self._array.standing, self._array.cancel

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
