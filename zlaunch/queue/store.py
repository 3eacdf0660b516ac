"""Keep the jobs of the embedded queue in SQLite: what was submitted, and what has become of it."""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from zlaunch.errors import LaunchError
from zlaunch.queue.schedule import Demand, Slots

State = Literal["waiting", "running", "ended"]
Wish = Literal["", "cancel", "cancelling", "timeout", "preempt"]
_BUSY_S = 30.0
_LARGEST = 2**63 - 1
"""The largest number that SQLite holds."""
_KEPT = 1000
"""Ended jobs that are remembered."""
_TABLE = """
CREATE TABLE IF NOT EXISTS jobs (
  id INTEGER PRIMARY KEY AUTOINCREMENT, submission TEXT NOT NULL, environ TEXT NOT NULL,
  state TEXT NOT NULL DEFAULT 'waiting', wish TEXT NOT NULL DEFAULT '', slots TEXT NOT NULL DEFAULT '{}',
  attempt INTEGER NOT NULL DEFAULT 0, failures INTEGER NOT NULL DEFAULT 0, submitted REAL NOT NULL,
  started REAL, ended REAL, exit_code INTEGER, why TEXT NOT NULL DEFAULT '')
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """Holds what a user has asked for. All paths are absolute."""

    run_id: str
    run_dir: str
    options: tuple[str, ...]
    """Options of zlaunch, without those that choose slots."""
    command: tuple[str, ...]
    """The script and its arguments."""
    cwd: str
    umask: int
    demand: Demand
    names: dict[str, str]
    """Host of the pool -> its name in the hostfile: this machine is `localhost` in every pool."""
    priority: int = 0
    after: tuple[str, ...] = ()
    """Folders of runs that have to end well before."""
    time_s: float | None = None
    retries: int = 0
    preemptible: bool = False
    grace_s: float = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedJob:
    """Holds a job of the queue as it stands. Times are in seconds since the epoch."""

    id: int
    submission: Submission
    state: State
    wish: Wish
    """Says what a running job has been asked for, or is to be."""
    slots: Slots
    attempt: int
    """Number of the attempt that runs, or of the one that comes next; from 0."""
    failures: int
    submitted: float
    started: float | None
    ended: float | None
    exit_code: int | None
    why: str
    """Why it ended as it did, or waits again."""


class Store:
    """Holds the jobs of one user on one machine. Every method raises LaunchError where the disk refuses."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "jobs.sqlite"
        with self._open() as base:
            base.execute(_TABLE)
        os.chmod(self._path, 0o600)  # it holds environments, which have secrets

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        try:
            with closing(sqlite3.connect(self._path, timeout=_BUSY_S)) as base, base:
                base.row_factory = sqlite3.Row
                base.execute("PRAGMA secure_delete = ON")
                yield base
        except sqlite3.Error as error:
            raise LaunchError(f"the queue's file {self._path}: {error}") from None

    def add(self, submission: Submission, environ: dict[str, str]) -> int:
        """Add a job that waits; return its id."""
        with self._open() as base:
            found = base.execute(
                "INSERT INTO jobs (submission, environ, submitted) VALUES (?, ?, ?)",
                (json.dumps(asdict(submission)), json.dumps(environ), time.time()),
            )
            assert found.lastrowid is not None
            return found.lastrowid

    def jobs(self, *states: State) -> list[QueuedJob]:
        """Return the jobs in these states, the oldest first."""
        marks = ",".join("?" * len(states))
        with self._open() as base:
            rows = base.execute(f"SELECT * FROM jobs WHERE state IN ({marks}) ORDER BY id", states)
            return [_job(row) for row in rows]

    def find(self, job_id: int) -> QueuedJob | None:
        """Return a job; None where there is none."""
        if job_id > _LARGEST:
            return None
        with self._open() as base:
            row = base.execute("SELECT * FROM jobs WHERE id = ?", (job_id,)).fetchone()
        return None if row is None else _job(row)

    def of_run(self, run_dir: Path) -> QueuedJob | None:
        """Return the newest job with this folder; None where there is none."""
        path = os.path.realpath(run_dir)
        found = [job for job in self.jobs("waiting", "running", "ended") if job.submission.run_dir == path]
        return found[-1] if found else None

    def environ(self, job_id: int) -> dict[str, str]:
        """Return the environment that a job was submitted in."""
        with self._open() as base:
            row = base.execute("SELECT environ FROM jobs WHERE id = ?", (job_id,)).fetchone()
        return {str(name): str(value) for name, value in json.loads(row["environ"]).items()}

    def start(self, job_id: int, slots: Slots) -> bool:
        """Note that a waiting job has slots now; False where it does not wait any more."""
        return self._change(
            "state = 'running', wish = '', slots = ?, started = ?, why = ''",
            (json.dumps(slots), time.time()),
            job_id,
            "waiting",
        )

    def ask(self, job: QueuedJob, wish: Wish) -> bool:
        """Note what a running job is asked for; False where it does not run, or was asked for another thing
        since it was read.
        """
        return self._change("wish = ?", (wish,), job.id, "running", job.wish)

    def wait_again(self, job: QueuedJob, why: str, *, attempt: int, failures: int) -> bool:
        """Take a running job's slots; it waits at its old place. False as for ``ask``."""
        return self._change(
            "state = 'waiting', wish = '', slots = '{}', why = ?, attempt = ?, failures = ?",
            (why, attempt, failures),
            job.id,
            "running",
            job.wish,
        )

    def end(self, job_id: int, state: State, exit_code: int, why: str) -> bool:
        """Note a job's end and forget its environment; False where it was in another state."""
        values = (time.time(), exit_code, why)
        done = self._change(
            "state = 'ended', wish = '', environ = '{}', ended = ?, exit_code = ?, why = ?",
            values,
            job_id,
            state,
        )
        with self._open() as base:
            base.execute("DELETE FROM jobs WHERE state = 'ended' AND id <= ?", (job_id - _KEPT,))
        return done

    def _change(
        self, what: str, values: Sequence[Any], job_id: int, state: State, wish: Wish | None = None
    ) -> bool:
        """Change a job that is in a state and, unless it is None, has a wish; False where it is not so."""
        where: str = "id = ? AND state = ?"
        known: list[int | str] = [job_id, state]
        if wish is not None:
            where, known = f"{where} AND wish = ?", [*known, wish]
        with self._open() as base:
            return base.execute(f"UPDATE jobs SET {what} WHERE {where}", (*values, *known)).rowcount == 1


def _job(row: sqlite3.Row) -> QueuedJob:
    known = json.loads(row["submission"])
    demand = Demand(_slots(known["demand"]["pool"]), known["demand"]["nodes"], known["demand"]["per_node"])
    lists = {name: tuple(known[name]) for name in ("options", "command", "after")}
    names = (
        "id",
        "state",
        "wish",
        "attempt",
        "failures",
        "submitted",
        "started",
        "ended",
        "exit_code",
        "why",
    )
    return QueuedJob(
        submission=Submission(**{**known, **lists, "demand": demand}),
        slots=_slots(json.loads(row["slots"])),
        **{name: row[name] for name in names},
    )


def _slots(data: dict[str, list[int]]) -> Slots:
    return {host: tuple(numbers) for host, numbers in data.items()}
