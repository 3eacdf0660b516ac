"""Run many command lines as one job array of SLURM's: the run in folder N is the array's task N."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from zlaunch.errors import LaunchError
from zlaunch.slurm.commands import FINISHED, PATIENCE_S, cancel, own_tasks, state, submit
from zlaunch.slurm.environment import SlurmError
from zlaunch.slurm.script import BatchScript, command_line, render
from zlaunch.supervisor import run_folder
from zlaunch.sweep.trials import write_private
from zlaunch.system.processes import uninterrupted

_TASK = "slurm_task"
"""File in a run's folder with its task's id, such as 1234_7."""
_MARK = "slurm_comment"
_OVERRIDES = ("SBATCH_ARRAY_INX", "SBATCH_OUTPUT", "SBATCH_JOB_NAME", "SBATCH_COMMENT")
"""Variables that win over what a batch file says."""
_WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD")
_ASK_S = 5.0
"""Seconds between questions to SLURM."""


class JobArray:
    """Holds the runs of a folder whose subfolders have numbers of so many digits, such as 007."""

    def __init__(self, folder: Path, digits: int) -> None:
        self._folder = folder.resolve()
        self._digits = digits
        self._tasks: dict[int, tuple[str, str]] = {}
        """Task in SLURM's queue -> its id, its state."""
        self._gone: dict[int, int] = {}
        """Task -> how often in a row it was not in the queue: not between a preemption and the requeue."""
        self._endings: dict[int, str] = {}
        """Task -> its last state in SLURM's words, where its launcher has left no end."""
        self._asked = self._answered = -PATIENCE_S

    def submit(self, batch: BatchScript, commands: Mapping[int, BatchScript], at_once: int | None) -> str:
        """Have each command run in its folder, as task of one array with the options of `batch`; return the
        array's id.

        Raises SlurmError with sbatch's words, and LaunchError where a file cannot be written.
        """
        numbers = _ranges(sorted(commands)) + (f"%{at_once}" if at_once is not None else "")
        mark = self._mark() or self._new_mark()
        name = _command_file(mark)
        number = f'"$(printf %0{self._digits}d "$SLURM_ARRAY_TASK_ID")"'
        array = replace(
            batch,
            array=numbers,
            job_name=self._folder.name,
            output=f"{str(self._folder).replace('%', '%%')}/%{self._digits}a/slurm.out",
            line=f"bash {shlex.quote(str(self._folder))}/{number}/{name}",
            sbatch=(*batch.sbatch, f"--comment={mark}"),
        )
        try:
            for each, command in commands.items():
                write_private(self._of(each) / name, f"exec {command_line(command)}\n")
            path = self._folder / "array.sbatch"
            write_private(path, render(array))
            with uninterrupted():
                job = submit(path, unset=_OVERRIDES)
                for each in commands:
                    self._note(each, f"{job}_{each}")
        except OSError as error:
            raise LaunchError(f"{error.filename or self._folder}: {error.strerror}") from None
        self._asked = -PATIENCE_S
        return job

    def find(self) -> None:
        """Find the runs that are in SLURM's queue already. Raises LaunchError where the folder of one is
        gone.
        """
        self.look()
        for number, (task, _) in self._tasks.items():
            if not (self._of(number) / _command_file(self._mark())).exists():
                raise LaunchError(
                    f"{self._of(number)} was removed, but its task {task} is in SLURM's queue: first "
                    f"`zlaunch cancel {task}`"
                )

    def look(self) -> None:
        """Ask SLURM how the runs stand, unless it has just been asked. Raises SlurmError when it has not
        answered for ten minutes.
        """
        now = time.monotonic()
        mark = self._mark()
        if now - self._asked < _ASK_S or not mark:
            return
        self._asked = now
        try:
            found = own_tasks(mark)
        except SlurmError:
            if now - self._answered > PATIENCE_S:
                raise
            return
        self._answered = now
        self._tasks = {}
        for task, word in found:
            number = int(task.rpartition("_")[2])
            self._tasks[number] = task, word
            self._gone.pop(number, None)
            with suppress(OSError):  # its folder may be gone
                if not (self._of(number) / _TASK).exists():
                    self._note(number, task)
        for path in self._folder.glob(f"*/{_TASK}"):
            name = path.parent.name
            if name.isdecimal() and (number := int(name)) not in self._tasks:
                self._gone[number] = self._gone.get(number, 0) + 1

    def standing(self, folder: Path) -> str:
        """Return `new`, `queued`, `running`, or `ended` and the exit code, or SLURM's word for the end."""
        known = run_folder.read(folder)
        if not folder.name.isdecimal() or not ((folder / _TASK).exists() or known):
            return "new"
        number = int(folder.name)
        if number in self._tasks:
            return "queued" if self._tasks[number][1] in _WAITING else "running"
        if known is not None and known.ended is not None:
            return f"ended {known.exit_code}"
        if not (folder / _TASK).exists():
            return "ended killed"
        if self._gone.get(number, 0) < 2:
            return "running"
        if number not in self._endings:
            try:
                found = state(task_of(folder))
            except SlurmError:
                return "running"
            if found not in FINISHED:
                return "queued" if found in _WAITING else "running"
            self._endings[number] = "0" if found == "COMPLETED" else found
        return f"ended {self._endings[number]}"

    def cancel(self, folder: Path) -> None:
        """End a run, or take it out of the queue. Raises SlurmError where SLURM cannot be asked."""
        known = self._tasks.get(int(folder.name))
        if known is not None and state(known[0]) not in FINISHED:
            cancel(known[0])

    def _mark(self) -> str:
        """Return the comment of its jobs in SLURM, by which they are found again also after a kill of who
        submitted them; empty before that.
        """
        try:
            return (self._folder / _MARK).read_text().strip()
        except FileNotFoundError:
            return ""

    def _new_mark(self) -> str:
        try:
            (self._folder / _MARK).write_text(f"zlaunch-array-{os.urandom(8).hex()}\n")
        except OSError as error:
            raise LaunchError(f"{error.filename}: {error.strerror}") from None
        return self._mark()

    def _of(self, number: int) -> Path:
        return self._folder / f"{number:0{self._digits}d}"

    def _note(self, number: int, task: str) -> None:
        (self._of(number) / _TASK).write_text(f"{task}\n")


def _command_file(mark: str) -> str:
    """Return the name of a run's command line: an array of an earlier sweep in this folder, which still
    waits, must not run these.
    """
    return f"command-{mark.rpartition('-')[2]}.sh"


def task_of(folder: Path) -> str:
    """Return the id of the task that a run's folder belongs to; empty where there is none."""
    try:
        return (folder / _TASK).read_text().strip()
    except OSError:
        return ""


def _ranges(numbers: Sequence[int]) -> str:
    """Write ascending numbers as sbatch's --array takes them: `1-3,7`."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][-1] + 1:
            found[-1].append(number)
        else:
            found.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in found)
