"""Keep the jobs of the embedded queue in SQLite: what was submitted, and what has become of it.

Note [Rows of several versions]
Several versions of zlaunch may share one file: a row carries the number of its format (`schema`) and the
version that wrote it. What everybody has to know of a job (its state, slots, run's folder) has columns of its
own; the rest is JSON that only a version with this format reads. A row that cannot be read is an
`UnreadableJob`: it is shown, can be cancelled, keeps its slots while its launcher lives, and is in nobody's
way. Versions up to 0.2.0 write format 1 and know nothing of the columns that came later: these have defaults.

Note [Rows that have not changed]
The daemon looks at every job that waits whenever a run ends, and a sweep has a thousand of them. A row is
large (the submission and the environment come first), so reading even one column of it is slow. The index
`jobs_by_state_and_key` tells whether a job that has not ended has changed: it holds the format, state, wish,
number of the attempt, and when that started. Only changed jobs are read again. A sweep asks for its trials
every second; `jobs_by_folder` holds the answer.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from zlaunch import __version__
from zlaunch.errors import LaunchError
from zlaunch.plan.plan import without_secrets
from zlaunch.queue.process_settings import ProcessSettings
from zlaunch.queue.schedule import Demand, Place, Slots, place_of
from zlaunch.supervisor.end import End
from zlaunch.supervisor.redact import redact, secret_values
from zlaunch.system import boot_clock

State = Literal["waiting", "running", "ended"]
PendingAction = Literal["", "cancel", "cancelling", "timeout", "preempt"]
"""What a running job was asked to do and has not done yet: the column `wish`. "" is nothing."""
_BUSY_S = 30.0
_LARGEST = 2**63 - 1
"""The largest number that SQLite holds."""
_KEPT = 1000
"""Ended jobs that are remembered."""
_PAGE = 200
"""Ended jobs that are read at a time."""
_FIRST_REST_S = 30.0
_LONGEST_REST_S = 1800.0
_DOUBLINGS = 10
"""Seconds for which a host or a slot rests that has refused a run; doubled each time."""
_SCHEMA = 2
"""Format of a row's JSON, see Note [Rows of several versions]."""
_LAYOUT = 2
"""Format of the file's tables."""
_TABLE = """
CREATE TABLE IF NOT EXISTS jobs (
  id INTEGER PRIMARY KEY AUTOINCREMENT, submission TEXT NOT NULL, environ TEXT NOT NULL,
  state TEXT NOT NULL DEFAULT 'waiting', wish TEXT NOT NULL DEFAULT '', slots TEXT NOT NULL DEFAULT '{}',
  attempt INTEGER NOT NULL DEFAULT 0, failures INTEGER NOT NULL DEFAULT 0, submitted REAL NOT NULL,
  started REAL, ended REAL, exit_code INTEGER, why TEXT NOT NULL DEFAULT '')
"""
_LATER_COLUMNS = {
    "schema": "INTEGER NOT NULL DEFAULT 1",
    "version": "TEXT NOT NULL DEFAULT '0.2.0 or older'",
    "run_id": "TEXT NOT NULL DEFAULT ''",
    "run_dir": "TEXT",
    "refusals": "INTEGER NOT NULL DEFAULT 0",
    "started_clock": "REAL",
    "started_boot": "TEXT NOT NULL DEFAULT ''",
    "cause": "TEXT",
}
_RESTS = """
CREATE TABLE IF NOT EXISTS rests (
  host TEXT PRIMARY KEY, refusals INTEGER NOT NULL, until_clock REAL NOT NULL, boot TEXT NOT NULL)
"""
_PLAIN = ("wish", "attempt", "failures", "submitted", "started", "ended", "exit_code", "why", "refusals")
_NAMED = ("id", "schema", "version", "run_id", "run_dir", "state", "slots", "cause")
_KEY = "id, schema, state, wish, attempt, started"
"""Columns that tell whether a row that has not ended is as it was, see Note [Rows that have not changed]."""
_INDEXES = (
    "CREATE INDEX IF NOT EXISTS jobs_by_state_and_key ON jobs (state, id, schema, wish, attempt, started)",
    "CREATE INDEX IF NOT EXISTS jobs_by_folder ON jobs (run_dir, id, state, exit_code)",
)
_SHORT = ", ".join((*_NAMED, "started_clock", "started_boot", *_PLAIN))
"""All columns but the submission and the environment, which may be large."""


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
    heartbeat_s: float = 60.0
    """Seconds after which agents on other hosts end without their launcher."""
    starter: tuple[str, ...] = ()
    """The command that starts the submitter's `zlaunch.cli.queued`, its interpreter first; empty for versions
    up to 0.2.0, which did not record it.
    """
    path: str = ""
    """The folder of the submitter's zlaunch package."""
    settings: ProcessSettings | None = None
    """The submitter's nice value, CPUs and resource limits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedJob:
    """Holds a job of the queue as it stands. Times are in seconds since the epoch."""

    id: int
    submission: Submission
    version: str
    """The zlaunch that it was submitted with."""
    state: State
    wish: PendingAction
    """The action that a running job was asked for, or will be."""
    slots: Slots
    attempt: int
    """Number of the attempt that runs, or of the one that comes next; from 0."""
    failures: int
    refusals: int
    """How often hosts refused it."""
    submitted: float
    started: float | None
    started_clock: float | None
    """When it started on CLOCK_BOOTTIME; None where the machine has been booted since."""
    ended: float | None
    exit_code: int | None
    cause: str | None
    why: str
    """Why it ended as it did, or waits again."""

    @property
    def end(self) -> End | None:
        """Return how it ended."""
        return End.from_json({"exit_code": self.exit_code, "cause": self.cause})


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadableJob:
    """Holds what is known of a job whose row this zlaunch cannot read."""

    id: int
    run_id: str
    run_dir: str
    """The run's folder; "" where it is not known."""
    version: str
    state: State
    wish: PendingAction
    slots: Slots
    attempt: int
    exit_code: int | None
    problem: str

    @property
    def text(self) -> str:
        """Say what is wrong with it."""
        return f"written by zlaunch {self.version}: {self.problem}"


Job = QueuedJob | UnreadableJob


class Store:
    """Holds the jobs of one user on one machine. Every method raises LaunchError where the disk refuses."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "jobs.sqlite"
        self._read: dict[tuple[Any, ...], Job] = {}
        """Key of a job that has not ended -> the job as it was read."""
        with self._open() as base:
            _prepare(base, self._path)
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
        content = json.dumps(asdict(replace(submission, settings=None)) | {"settings": _settings(submission)})
        with self._open() as base:
            found = base.execute(
                "INSERT INTO jobs (submission, environ, submitted, schema, version, run_id, run_dir)"
                " VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    *(content, json.dumps(environ), time.time(), _SCHEMA, __version__),
                    *(submission.run_id, _as_text(submission.run_dir)),
                ),
            )
            assert found.lastrowid is not None
            return found.lastrowid

    def rows(self, *states: State) -> list[Job]:
        """Return the jobs in these states, the oldest first, with those that cannot be read."""
        marks = ",".join("?" * len(states))
        with self._open() as base:
            base.execute("BEGIN")
            keys = base.cursor()
            keys.row_factory = None  # plain tuples
            keys.execute(f"SELECT {_KEY} FROM jobs WHERE state IN ({marks}) ORDER BY id", states)
            found = [self._read.get(key) or self._read_job(base, key) for key in keys.fetchall()]
        if len(self._read) > 2 * len(found) + _PAGE:
            self._read.clear()  # most of it has ended since
        return found

    def _read_job(self, base: sqlite3.Connection, key: tuple[Any, ...]) -> Job:
        """Read the job with a key that is not known yet."""
        row = base.execute(f"SELECT {_SHORT} FROM jobs WHERE id = ?", key[:1]).fetchone()
        job = _job(base, row)
        if job.state != "ended":
            self._read[key] = job
        return job

    def jobs(self, *states: State) -> list[QueuedJob]:
        """Return the jobs in these states that can be read, the oldest first."""
        return [job for job in self.rows(*states) if isinstance(job, QueuedJob)]

    def has_waiting(self) -> bool:
        """Tell whether a job waits that this zlaunch can start."""
        with self._open() as base:
            question = "SELECT 1 FROM jobs WHERE state = 'waiting' AND schema <= ? LIMIT 1"
            return base.execute(question, (_SCHEMA,)).fetchone() is not None

    def ended_pages(self) -> Iterator[list[Job]]:
        """Yield the ended jobs by pages, the newest first."""
        before = _LARGEST
        while True:
            with self._open() as base:
                rows = base.execute(
                    f"SELECT {_SHORT} FROM jobs WHERE state = 'ended' AND id < ? ORDER BY id DESC LIMIT ?",
                    (before, _PAGE),
                )
                page = [_job(base, row) for row in rows.fetchall()]
            if not page:
                return
            before = page[-1].id
            yield page

    def find(self, job_id: int) -> Job | None:
        """Return a job; None where there is none."""
        return self._one("id = ?", job_id) if job_id <= _LARGEST else None

    def of_run(self, run_dir: Path) -> Job | None:
        """Return the newest job with this folder; None where there is none."""
        return self._one("run_dir = ? ORDER BY id DESC LIMIT 1", _as_text(os.path.realpath(run_dir)))

    def _one(self, where: str, value: int | str) -> Job | None:
        with self._open() as base:
            row = base.execute(f"SELECT {_SHORT} FROM jobs WHERE {where}", (value,)).fetchone()
            return None if row is None else _job(base, row)

    def states_under(self, folder: Path) -> dict[str, tuple[State, int | None]]:
        """Return state and exit code of the jobs whose run's folder lies in a folder, by run's folder."""
        above = _as_text(os.path.join(os.path.realpath(folder), ""))
        with self._open() as base:
            rows = base.execute(
                "SELECT run_dir, state, exit_code FROM jobs WHERE run_dir > ? AND run_dir < ? ORDER BY id",
                (above, above[:-1] + chr(ord("/") + 1)),
            )
            return {_from_text(row[0]): (row[1], row[2]) for row in rows}

    def run_dirs(self) -> list[Path]:
        """Return the folders of all runs, the oldest first."""
        with self._open() as base:
            rows = base.execute("SELECT run_dir FROM jobs WHERE run_dir != '' ORDER BY id")
            return [Path(_from_text(row[0])) for row in rows]

    def environ(self, job_id: int) -> dict[str, str]:
        """Return the environment that a job was submitted in."""
        with self._open() as base:
            row = base.execute("SELECT environ FROM jobs WHERE id = ?", (job_id,)).fetchone()
        return _environ(row)

    # -- changes: each returns False where the job was in another state, so that the first one wins

    def start(self, job_id: int, slots: Slots) -> bool:
        """Note that a waiting job has slots now; False where it does not wait any more."""
        now = (time.time(), boot_clock.now_s(), boot_clock.boot_id())
        times = "started = ?, started_clock = ?, started_boot = ?"
        return self._change(
            f"state = 'running', wish = '', why = '', slots = ?, {times}",
            (json.dumps(slots), *now),
            "id = ? AND state = 'waiting'",
            (job_id,),
        )

    def ask(self, job: Job, wish: PendingAction) -> bool:
        """Note what a running job is asked for; False where it does not run, or was asked for another thing
        since it was read.
        """
        return job.state == "running" and self._change("wish = ?", (wish,), *_unchanged(job))

    def wait_again(self, job: QueuedJob, why: str, *, attempt: int, failures: int, refusals: int = 0) -> bool:
        """Take a running job's slots; it waits at its old place. False as for ``ask``."""
        return job.state == "running" and self._change(
            "state = 'waiting', wish = '', slots = '{}', why = ?, attempt = ?, failures = ?, refusals = ?",
            (why, attempt, failures, refusals),
            *_unchanged(job),
        )

    def end(self, job: Job, end: End, why: str) -> bool:
        """Note a job's end, forget its environment and the secrets of its command; False as for ``ask``."""
        with self._open() as base:
            base.execute("BEGIN IMMEDIATE")
            row = base.execute("SELECT environ, submission FROM jobs WHERE id = ?", (job.id,)).fetchone()
            where, known = _unchanged(job)
            if row is None:
                return False
            changed = base.execute(
                "UPDATE jobs SET state = 'ended', wish = '', environ = '{}', submission = ?, ended = ?,"
                f" exit_code = ?, cause = ?, why = ? WHERE {where}",
                (_without_secrets(row), time.time(), end.code, end.cause, why, *known),
            ).rowcount
            base.execute("DELETE FROM jobs WHERE state = 'ended' AND id <= ?", (job.id - _KEPT,))
        return changed == 1

    def _change(self, what: str, values: Sequence[Any], where: str, known: Sequence[Any]) -> bool:
        with self._open() as base:
            return base.execute(f"UPDATE jobs SET {what} WHERE {where}", (*values, *known)).rowcount == 1

    # -- hosts and slots that are backing off: the column `host` has places

    def back_off(self, place: Place) -> float:
        """Give a place that refused a run no jobs for a while, longer each time. Return the seconds."""
        with self._open() as base:
            base.execute("BEGIN IMMEDIATE")
            row = base.execute("SELECT refusals FROM rests WHERE host = ?", (place,)).fetchone()
            refusals = 1 if row is None else int(row["refusals"]) + 1
            seconds = min(_FIRST_REST_S * 2.0 ** min(refusals - 1, _DOUBLINGS), _LONGEST_REST_S)
            base.execute(
                "INSERT OR REPLACE INTO rests VALUES (?, ?, ?, ?)",
                (place, refusals, boot_clock.now_s() + seconds, boot_clock.boot_id()),
            )
        return seconds

    def backing_off(self) -> dict[Place, float]:
        """Return the places that get no jobs now, because they refused a run, with the remaining seconds."""
        now = boot_clock.now_s()
        with self._open() as base:
            rows = base.execute(
                "SELECT host, until_clock FROM rests WHERE boot = ? AND until_clock > ?",
                (boot_clock.boot_id(), now),
            )
            return {row["host"]: row["until_clock"] - now for row in rows}

    def wake_slots(self, slots: Slots) -> None:
        """Forget that slots and their hosts have refused runs: one has started there."""
        woken = [*slots, *(place_of(host, slot) for host, numbers in slots.items() for slot in numbers)]
        with self._open() as base:
            base.executemany("DELETE FROM rests WHERE host = ?", [(place,) for place in woken])


# -- rows


class _UnreadableRowError(ValueError):
    """Says what is wrong with a row."""


def _job(base: sqlite3.Connection, row: sqlite3.Row) -> Job:
    try:
        return _read_job(row, _read_submission(row, _submission_of(base, row["id"])))
    except _UnreadableRowError as error:
        return _unreadable(row, str(error))


def _prepare(base: sqlite3.Connection, path: Path) -> None:
    """Make the tables, or bring those of an older version up to date."""
    layout = base.execute("PRAGMA user_version").fetchone()[0]
    if layout > _LAYOUT:
        raise LaunchError(
            f"the queue's file {path} is from a newer zlaunch (layout {layout}, this one reads {_LAYOUT}): "
            "use that version, or another queue with XDG_STATE_HOME=DIR"
        )
    if layout < _LAYOUT:
        base.execute("BEGIN IMMEDIATE")
        base.execute(_TABLE)
        there = {row["name"] for row in base.execute("PRAGMA table_info(jobs)")}
        for name, kind in _LATER_COLUMNS.items():
            if name not in there:
                base.execute(f"ALTER TABLE jobs ADD COLUMN {name} {kind}")
        base.execute(_RESTS)
        base.execute(f"PRAGMA user_version = {_LAYOUT}")
    for statement in _INDEXES:
        base.execute(statement)
    # An older zlaunch may still add rows.
    for row in base.execute("SELECT id, submission FROM jobs WHERE run_dir IS NULL").fetchall():
        run_id, run_dir = _identity(row["submission"])
        base.execute("UPDATE jobs SET run_id = ?, run_dir = ? WHERE id = ?", (run_id, run_dir, row["id"]))


def _identity(submission: object) -> tuple[str, str]:
    """Return a run's id and folder; "" for what cannot be read."""
    try:
        known = json.loads(submission)  # type: ignore[arg-type]  # a damaged row may hold anything
        return str(known["run_id"]), _as_text(str(known["run_dir"]))
    except (ValueError, TypeError, KeyError, RecursionError):
        return "", ""


def _as_text(path: str) -> str:
    """Return a path as SQLite can hold it: a name need not be UTF-8."""
    return json.dumps(path)[1:-1] if "\\" in path or not path.isascii() else path


def _from_text(text: str) -> str:
    return str(json.loads(f'"{text}"')) if "\\" in text else text


def _settings(submission: Submission) -> dict[str, Any] | None:
    return None if submission.settings is None else submission.settings.as_json()


def _submission_of(base: sqlite3.Connection, job_id: int) -> object:
    row = base.execute("SELECT submission FROM jobs WHERE id = ?", (job_id,)).fetchone()
    return None if row is None else row["submission"]


def _environ(row: sqlite3.Row | None) -> dict[str, str]:
    try:
        content = json.loads(row["environ"] if row is not None else "null")
        return {str(name): str(value) for name, value in content.items()}
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise LaunchError("its saved environment cannot be read: submit it again") from None


def _unchanged(job: Job) -> tuple[str, tuple[int | str, ...]]:
    """Return the condition that a job is as it was read."""
    known = (job.id, job.state, job.wish, job.attempt)
    return "id = ? AND state = ? AND wish = ? AND attempt = ?", known


def _without_secrets(row: sqlite3.Row) -> str:
    """Return the submission of a job that has ended: what `zlaunch queue` shows stays, without secrets."""
    try:
        values = secret_values(_environ(row))
        content = json.loads(row["submission"])
        for name in ("command", "options"):
            content[name] = [redact(word, values)[0] for word in without_secrets(content[name])]
        return json.dumps(content)
    except (LaunchError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return "{}"  # what cannot be read may hold secrets


# -- reading


def _is_texts(value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(each, str) for each in value)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_LISTS = ("options", "command", "after", "starter")
_CHECKS: dict[str, Callable[[object], bool]] = {
    **dict.fromkeys(("run_id", "run_dir", "cwd", "path"), lambda value: isinstance(value, str)),
    **dict.fromkeys(_LISTS, _is_texts),
    **dict.fromkeys(("umask", "priority", "retries"), _is_count),
    **dict.fromkeys(("grace_s", "heartbeat_s"), _is_number),
    "time_s": lambda value: value is None or _is_number(value),
    "preemptible": lambda value: isinstance(value, bool),
    "names": lambda value: isinstance(value, dict) and _is_texts(list(value.values())),
}
"""Field of a submission -> whether a value can be its."""


def _read_submission(row: sqlite3.Row, text: object) -> Submission:
    if row["schema"] not in (1, _SCHEMA):
        raise _UnreadableRowError(f"its format is {row['schema']}, which zlaunch {__version__} cannot read")
    try:
        known = json.loads(text)  # type: ignore[arg-type]  # a damaged row may hold anything
        for name, value in known.items():
            if name in _CHECKS and not _CHECKS[name](value):
                raise _UnreadableRowError(f"its {name} is damaged")
        demand = known["demand"]
        settings = known.get("settings")
        known |= {name: tuple(known[name]) for name in _LISTS if name in known}
        known["demand"] = Demand(_slots(demand["pool"]), *_demanded(demand["nodes"], demand["per_node"]))
        known["settings"] = None if settings is None else ProcessSettings.from_json(settings)
        return Submission(**known)
    except _UnreadableRowError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _UnreadableRowError(f"it is damaged ({type(error).__name__}: {error})") from None


def _demanded(nodes: object, per_node: object) -> tuple[int, int | None]:
    if not isinstance(nodes, int) or not isinstance(per_node, (int, type(None))):
        raise _UnreadableRowError("its demand is damaged")
    return nodes, per_node


def _read_job(row: sqlite3.Row, submission: Submission) -> QueuedJob:
    try:
        slots = _slots(json.loads(row["slots"]))
        numbers = [row[name] for name in ("attempt", "failures", "refusals")]
        times = [row[name] for name in ("submitted", "started", "ended", "started_clock")]
        if not all(map(_is_count, numbers)) or not all(time is None or _is_number(time) for time in times):
            raise ValueError("numbers")
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise _UnreadableRowError("its row is damaged") from None
    is_now = row["started_boot"] == boot_clock.boot_id()
    return QueuedJob(
        id=row["id"],
        submission=submission,
        version=row["version"],
        state=row["state"],
        slots=slots,
        started_clock=row["started_clock"] if is_now else None,
        cause=row["cause"],
        **{name: row[name] for name in _PLAIN},
    )


def _unreadable(row: sqlite3.Row, problem: str) -> UnreadableJob:
    try:
        slots = _slots(json.loads(row["slots"]))
    except (ValueError, TypeError, AttributeError, RecursionError):
        slots = {}
    return UnreadableJob(
        id=row["id"],
        run_id=str(row["run_id"]),
        run_dir=_from_text(str(row["run_dir"] or "")),
        version=str(row["version"]),
        state=row["state"],
        wish=row["wish"],
        slots=slots,
        attempt=row["attempt"] if _is_count(row["attempt"]) else 0,
        exit_code=row["exit_code"] if _is_count(row["exit_code"]) else None,
        problem=problem,
    )


def _slots(data: Any) -> Slots:
    slots = {str(host): tuple(numbers) for host, numbers in data.items()}
    if not all(_is_count(number) for numbers in slots.values() for number in numbers):
        raise ValueError("slots")
    return slots
