"""Have the trials of a sweep run by zlaunch's own queue, or as a job array of SLURM's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from zlaunch.errors import LaunchError
from zlaunch.queue.daemon import cancel_job, ensure_daemon, queue_folder, settle, settle_queue, wake
from zlaunch.queue.store import Store
from zlaunch.queue.submit import SubmitRequest, enqueue
from zlaunch.supervisor import run_folder
from zlaunch.supervisor.found_runs import FoundRun
from zlaunch.sweep.job_array import JobArray

if TYPE_CHECKING:
    from zlaunch.launchers.base import Launcher
    from zlaunch.slurm.script import BatchScript


class TrialQueue(Protocol):
    """Runs trials: a run is known by its folder."""

    def check(self, request: SubmitRequest) -> None:
        """Refuse a command line that cannot run. Raises LaunchError."""

    def submit(self, request: SubmitRequest, trials: Mapping[int, SubmitRequest]) -> str:
        """Queue trials, by number; `request` is what they have in common. Return what to tell the user."""

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

    def __init__(self, folder: Path, prepare: Callable[[SubmitRequest], Launcher]) -> None:
        """Take the folder of the trials; `prepare` makes the launcher of a trial, or raises."""
        self._prepare = prepare
        self._folder = queue_folder()
        self._trials = folder
        self._store = Store(self._folder)
        self._known = self._store.states_under(folder)
        """Folder of a trial -> how its job stood at the last look: one question for all of them."""
        self._ended: dict[Path, str] = {}
        """Folder of a trial -> how it ended, for trials that are no longer in the queue."""
        for path in folder.resolve().glob("*/launcher.json"):
            record = run_folder.read(path.parent)
            is_marked = record is not None and not record.pid and run_folder.is_queued(path.parent)
            if is_marked and str(path.parent) not in self._known:
                path.unlink()  # a sweep was killed before it was in the queue

    def check(self, request: SubmitRequest) -> None:
        self._prepare(request)

    def submit(self, request: SubmitRequest, trials: Mapping[int, SubmitRequest]) -> str:
        for each in trials.values():
            enqueue(each, self._prepare)
            ensure_daemon(self._folder)
        return ""

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
        if (job := self._store.of_run(folder)) is not None:
            cancel_job(self._store, job)
            wake(self._folder)


def _has_record(folder: Path | str) -> bool:
    """Return whether a run's folder has its record, which is there before the run is queued."""
    return Path(folder, "launcher.json").exists()


class SlurmQueue:
    """Runs trials as tasks of job arrays of SLURM's."""

    def __init__(
        self,
        folder: Path,
        digits: int,
        at_once: int | None,
        batch_of: Callable[[SubmitRequest], BatchScript],
    ) -> None:
        """Take the folder of the trials; `batch_of` returns the batch script of a trial, or raises."""
        if "\\" in str(folder.resolve()):
            raise LaunchError(f"--dir {folder}: SLURM allows no backslash in the name of a job's output")
        self._array = JobArray(folder, digits)
        self._at_once = at_once
        self._batch_of = batch_of
        self.find = self._array.find
        self.look = self._array.look
        self.standing = self._array.standing
        self.cancel = self._array.cancel

    def check(self, request: SubmitRequest) -> None:
        for option in " ".join(request.about["sbatch"]).split():
            if option.startswith(("--array", "-a", "--output", "-o", "--comment", "-J", "--job-name")):
                raise LaunchError(f"--sbatch {option!r}: the sweep sets this option itself")
        self._batch_of(request)

    def submit(self, request: SubmitRequest, trials: Mapping[int, SubmitRequest]) -> str:
        if not trials:
            return ""
        commands = {number: self._batch_of(_in_folder(each)) for number, each in trials.items()}
        job = self._array.submit(self._batch_of(request), commands, self._at_once)
        return f"job {job} of SLURM: zlaunch cancel {job} takes out all of it"


def _in_folder(request: SubmitRequest) -> SubmitRequest:
    """Return a command line that says where its run's files go."""
    return request._replace(options=(*request.options, ("run_dir", f"--run_dir={request.given['run_dir']}")))
