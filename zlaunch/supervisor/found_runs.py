"""Find the runs of a folder by what their launchers have written there."""

from __future__ import annotations

import difflib
import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from zlaunch.errors import LaunchError
from zlaunch.runtime.trust import Folder, UntrustedError, check_folder
from zlaunch.slurm.commands import FINISHED, describe, has_started, job_state, list_living
from zlaunch.supervisor import run_folder
from zlaunch.supervisor.run_folder import is_locked
from zlaunch.system import boot_clock
from zlaunch.system.events import decode
from zlaunch.system.processes import signal_name

if TYPE_CHECKING:
    from zlaunch.supervisor.run_folder import RunRecord

DEFAULT_FOLDER = "runs"
_CLOCK_SKEW_S = 5.0
"""A list of SLURM's jobs may lack a run that began at most this many seconds before it, and a run may seem to
begin this many seconds before its job: SLURM's controller has another clock.
"""
_RANK_EVENTS = tuple(f'"type":"{kind}"'.encode() for kind in ("start", "spawn", "exit", "lost"))


@dataclass(frozen=True, slots=True)
class FoundRun:
    """Holds a run's folder and what its launcher wrote there."""

    name: str
    path: Path
    record: RunRecord
    note: str = ""
    """Why nobody will start it although it is queued."""

    @property
    def is_elsewhere(self) -> bool:
        """Tell whether its launcher ran on another host: only that host can tell whether it still runs."""
        return self.record.host != socket.gethostname()

    @property
    def state(self) -> str:
        """Return `running`, `queued`, `ended CODE`, `on HOST`, or `gone`: killed, without an end. Of a SLURM
        job on another host, squeue tells whether it has ended.
        """
        waits = run_folder.is_queued(self.path)
        if self.record.ended is not None and not waits:
            return f"ended {self.record.exit_code}"
        if self.is_elsewhere:
            return "gone" if self._lives_in_slurm() is False else f"on {self.record.host}"
        if self._has_launcher():
            return "running"
        return "queued" if waits else "gone"

    @property
    def ends_visibly_elsewhere(self) -> bool:
        """Tell whether the end of a launcher on another host is seen here: its record has it, or SLURM."""
        return self.is_elsewhere and bool(self.record.slurm_job) and list_living().jobs is not None

    @property
    def shows_its_end(self) -> bool:
        """Tell whether this host sees the end of a launcher that is killed."""
        return not self.is_elsewhere or self._lives_in_slurm() is not None

    def _lives_in_slurm(self) -> bool | None:
        """Tell whether its SLURM job has not ended, nor been started again since; None outside of one, or if
        SLURM does not tell here.
        """
        if not self.record.slurm_job:
            return None
        living, asked = list_living()
        if living is None:
            return None
        job_start = living.get(self.record.slurm_job)
        if job_start is not None:
            return self.record.started >= job_start - _CLOCK_SKEW_S
        return None if asked - self.record.started < _CLOCK_SKEW_S else False

    def _has_launcher(self) -> bool:
        """Tell whether its launcher lives on this host. One in another pid namespace is known by its lock."""
        if not self.record.is_of_other_namespace:
            return self.record.is_running()
        is_now = self.record.boot in ("", boot_clock.boot_id())
        return is_now and self.record.ended is None and is_locked(self.path)

    @property
    def shown_state(self) -> str:
        """Return the state as people read it: of an end also the cause, unless the exit code 0 says it."""
        state = self.state
        end = self.record.end
        if self.note and state == "queued":
            return f"queued; {self.note}"
        if end is None or end.cause == "finished" or not state.startswith("ended"):
            return state
        return f"{state} ({self.record.why or end.words})"

    @property
    def has_ended(self) -> bool:
        """Tell whether nothing of it goes on, as far as can be told here."""
        return self.state.startswith(("ended", "gone"))

    def now(self) -> FoundRun:
        """Return the run with its record as it is by now."""
        known = run_folder.read(self.path)
        return self if known is None else FoundRun(self.name, self.path, known)


class RunsOfFolder(NamedTuple):
    """Holds what a folder of runs has."""

    runs: list[FoundRun]
    """The runs that can be read, the oldest first."""
    broken: list[Path]
    """The folders of runs whose record cannot be read."""
    refused: dict[Path, str]
    """The folders of runs that are not this user's alone, and why. Nothing in them is read."""


@dataclass(frozen=True, slots=True)
class Rank:
    """Describes a worker of the last attempt."""

    rank: int
    host: str
    pid: int
    state: str


def find_runs(folder: Path) -> list[FoundRun]:
    """Find the runs in a folder, the oldest first; those under SLURM steps lie one folder deeper.

    Raises LaunchError if the folder is there and cannot be read.
    """
    return look_into(folder).runs


def look_into(folder: Path) -> RunsOfFolder:
    """Find the runs in a folder as `find_runs` does, and those that cannot be read or are refused.

    Raises LaunchError.
    """
    if folder.is_dir() and not os.access(folder, os.R_OK | os.X_OK):
        raise LaunchError(f"{folder}: Permission denied")
    found: list[FoundRun] = []
    broken: list[Path] = []
    refused: dict[Path, str] = {}
    for path in _candidates(folder):
        known = run_folder.read(path)
        if known is not None:
            found.append(FoundRun(str(path.relative_to(folder)), path, known))
        elif not _has_record(path):
            continue  # it has just been removed
        elif why := why_refused(path):
            refused[path] = why
        else:
            broken.append(path)
    found.sort(key=lambda run: (run.record.came, run.name))
    return RunsOfFolder(found, sorted(broken), dict(sorted(refused.items())))


def _candidates(folder: Path) -> Iterator[Path]:
    """Yield the folders in a folder, and those in them, that have a record. Others may vanish meanwhile."""
    for above in (folder, *_folders(folder)):
        for path in _folders(above):
            if _has_record(path):
                yield path


def _folders(folder: Path) -> list[Path]:
    """Return the folders in a folder, without links, as `latest` is one; none where it cannot be read."""
    try:
        with os.scandir(folder) as entries:
            return [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def why_refused(folder: Path) -> str | None:
    """Return why a folder is not trusted; None where it is. See Note [Trust by owner] in runtime/trust.py."""
    try:
        check_folder(folder)
    except OSError as error:
        return error.strerror or str(error)
    return None


def find_run(text: str) -> FoundRun:
    """Find the run with this folder or name. Raises LaunchError, with the nearest name."""
    places = (Path(text), Path(DEFAULT_FOLDER, text))
    for path in places:
        known = run_folder.read(path)
        if known is not None:
            return FoundRun(text, path, known)
    for path in places:
        if inside := find_runs(path):
            raise LaunchError(f"{text!r} is a folder of runs: name one of them, such as {inside[-1].path}")
        if _has_record(path):
            check_run_folder(path)
            raise LaunchError(f"{path / 'launcher.json'} cannot be read")
    if places[0].is_dir():
        check_run_folder(places[0])
        raise LaunchError(f"{text!r} is not a run's folder: it has no launcher.json")
    known_here = find_runs(Path(DEFAULT_FOLDER))
    names = [run.name for run in known_here] + [run.record.name for run in known_here if run.record.name]
    names += [str(run.path) for run in find_runs(places[0].parent)]
    if state := job_state(text):
        has_none = ": its run has not begun"
        if state in FINISHED:
            output = (
                f": it has left no run here. Its output says why, slurm-{text}.out unless --output names it"
            )
            has_none = output if has_started(text) else ""
        raise LaunchError(f"SLURM job {text} {describe(text, state)}{has_none}")
    near = difflib.get_close_matches(text, names, n=1)
    others = "; `zlaunch ps --all` lists the runs in runs/; name a run of --run_dir by its folder"
    hint = f", did you mean {near[0]!r}?" if near else others
    raise LaunchError(f"no run {text!r}{hint}")


def newest_of_job(job: str) -> FoundRun:
    """Return the newest run of a SLURM job: a requeued job has several. Raises LaunchError."""
    of_job = _of_job(find_runs(Path(DEFAULT_FOLDER)), job)
    return of_job[-1] if of_job else find_run(job)


def _of_job(known: Sequence[FoundRun], job: str) -> list[FoundRun]:
    """Return the runs of a SLURM job, of its last start if it was requeued."""
    found = [run for run in known if job and job in (run.record.slurm_job, run.record.slurm_task)]
    last = max((run.record.slurm_restarts for run in found), default=0)
    return [run for run in found if run.record.slurm_restarts == last]


def check_run_folder(folder: Path) -> None:
    """Raise LaunchError where a folder is not trusted: nothing in it may be read."""
    try:
        check_folder(folder)
    except UntrustedError as error:
        raise LaunchError(f"{error}; zlaunch uses only runs that no other user can change") from None
    except OSError as error:
        raise LaunchError(f"{folder}: {error.strerror}") from None


def meant(text: str) -> str:
    """Return the name or folder of the run that a word means.

    `last` is the newest run, and a name of `--name` the newest run that has it. A unique prefix of a folder's
    name, or of the part after its last dash, is enough. The id of a SLURM job (12, 11_1) means the one run in
    runs/ of that job, of its last start if it was requeued. Files and folders without a record hide no run.

    Raises LaunchError where there is no run, or more than one.
    """
    places = (Path(text), Path(DEFAULT_FOLDER, text))
    if "/" in text and any(path.exists() for path in places):
        return text
    folders = [path for path in places if _has_record(path)]
    known = find_runs(Path(DEFAULT_FOLDER))
    named = [run for run in known if text and run.record.name == text]
    if folders:
        _check_is_one(text, folders[0], named)
        return text
    if text != "last":
        if named:
            return str(named[-1].path)
        if any(find_runs(path) for path in places):
            return text  # a folder of runs
        tasks = sorted(
            {run.record.slurm_task for run in known if run.record.slurm_task.startswith(f"{text}_")}
        )
        if text and len(tasks) > 1:
            listed = ", ".join(tasks[-3:])
            raise LaunchError(f"SLURM job {text} is an array: name one of its tasks, such as {listed}")
        of_job = _of_job(known, text)
        if len(of_job) == 1:
            return str(of_job[0].path)
        if not of_job and job_state(text):
            return text  # a number, such as 2, is also the beginning of a date
        if of_job:
            names = ", ".join(run.name for run in of_job[-3:])
            raise LaunchError(f"SLURM job {text} has {len(of_job)} runs, such as {names}: name one of them")
        found = [
            run
            for run in known
            if text and (run.name.startswith(text) or run.name.rpartition("-")[2].startswith(text))
        ]
        if len(found) > 1:
            names = ", ".join(run.name for run in found[-3:])
            raise LaunchError(f"{text!r} matches {len(found)} runs, such as {names}: use a longer prefix")
        return str(found[0].path) if found else text
    if not known:
        raise LaunchError(f"last: no runs in {Path(DEFAULT_FOLDER).absolute()}: name the folder of a run")
    return str(known[-1].path)


def _has_record(path: Path) -> bool:
    return os.path.lexists(path / "launcher.json")


def _check_is_one(text: str, folder: Path, named: Sequence[FoundRun]) -> None:
    """Raise LaunchError where a run's folder has the name that another run was given."""
    if named and os.path.realpath(named[-1].path) != os.path.realpath(folder):
        where = f"./{folder}" if folder.parent == Path() else str(folder)
        raise LaunchError(
            f"{text!r} is the folder of one run and the name of another: use {where} or {named[-1].path}"
        )


def own_pids(run: FoundRun) -> list[int]:
    """Find the living processes of a run's workers on this host, by the run's id in their environment."""
    mark = f"ZLAUNCH_RUN_ID={run.record.run_id}".encode()
    found = []
    for event in _rank_events(run.path):
        try:
            environ = Path("/proc", str(event["pid"]), "environ").read_bytes()
        except (OSError, KeyError):
            continue
        if mark in environ.split(b"\0"):
            found.append(int(event["pid"]))
    return found


def read_ranks(run: FoundRun) -> list[Rank]:
    """Read the ranks of the last attempt from its events."""
    ranks: dict[int, Rank] = {}
    for event in _rank_events(run.path):
        kind = event.get("type")
        rank = event.get("rank")
        if kind in ("spawn", "exit") and not _is_whole(event):
            continue  # another program has written into the file
        if kind == "start":
            ranks.clear()
        elif kind == "spawn":
            ranks[event["rank"]] = Rank(event["rank"], event["host"], event["pid"], "running")
        elif kind == "exit" and rank in ranks:
            code = event["returncode"]
            how = f"exited {code}" if code >= 0 else f"killed by {signal_name(-code)}"
            ranks[rank] = replace(ranks[rank], state=how)
        elif kind == "lost":
            ranks |= {r.rank: replace(r, state="node lost") for r in alive(ranks.values(), event["host"])}
    if run.state == "gone" or run.record.ended is not None:
        ranks |= {r.rank: replace(r, state="unknown") for r in alive(ranks.values())}
    return [ranks[rank] for rank in sorted(ranks)]


def _is_whole(event: dict[str, Any]) -> bool:
    numbers = ("rank", "pid", "returncode") if event["type"] == "exit" else ("rank", "pid")
    return isinstance(event.get("host"), str) and all(isinstance(event.get(name), int) for name in numbers)


def _rank_events(run_dir: Path) -> Iterable[dict[str, Any]]:
    try:
        with Folder(run_dir) as folder, folder.open("events.jsonl") as file:
            for line in file:
                # Most lines are metrics; parsing them all would take seconds for a long run.
                event = decode(line) if any(mark in line for mark in _RANK_EVENTS) else None
                if event is not None:
                    yield event
    except (OSError, RecursionError):
        return


def alive(ranks: Iterable[Rank], host: str | None = None) -> list[Rank]:
    return [r for r in ranks if r.state == "running" and host in (None, r.host)]
