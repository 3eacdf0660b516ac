"""Collect what the pages show: the runs of a folder, the queue's jobs, sweeps.

Note [Answers in time]
A folder may have hundreds of runs with gigabytes of events. The list reads events for a short time in each
answer, the newest runs first, and goes on from there in the next. Of a run that has ended only the summary
stays in memory, until its events file changes; the last runs that somebody opened stay whole.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from zlaunch.errors import LaunchError
from zlaunch.queue.daemon import settle, settle_all
from zlaunch.supervisor import run_folder
from zlaunch.supervisor.found_runs import FoundRun, RunsOfFolder, look_into
from zlaunch.supervisor.redact import redact
from zlaunch.supervisor.run_files import LogReader, log_path
from zlaunch.ui.html import as_text
from zlaunch.ui.jobs import ShownSweep, find_sweeps, open_trials_of, run_folders
from zlaunch.ui.run_pages import RunReader
from zlaunch.view.page import RunPage
from zlaunch.view.progress import RunProgress

_LIST_S = 0.3
"""Seconds for which one answer of the list reads events."""
_PAGE_S = 1.5
"""Seconds for which one answer of a run's page reads events."""
_SPARK_POINTS = 60
_OPENED = 8
"""Runs that stay whole in memory after they have ended."""
_LOG_BYTES = 16_384
_LOG_LINES = 40
_UNREADABLE = "its launcher.json cannot be read"


@dataclass(frozen=True, slots=True)
class RunSummary:
    """Holds what the list shows of a run."""

    key: str
    """Names the run in addresses."""
    state: str = "broken"
    why: str = ""
    """Why it is broken or has failed."""
    is_read: bool = True
    """Whether all of its events have been read."""
    step: int | None = None
    steps: int | None = None
    of_epoch: int | None = None
    """The epoch that `steps` ends; None where it ends the run."""
    left_s: float | None = None
    losses: tuple[float, ...] = ()
    workers: int = 0
    hosts: tuple[str, ...] = ()
    came: float = 0.0
    """When its command line was given, in seconds since the epoch."""
    command: str = ""
    label: str = ""
    """Its name and tags."""


@dataclass(slots=True)
class _Entry:
    """Remembers a run: the state of its events file, and what has been read of it."""

    run_id: str
    signature: tuple[int, int] | None = None
    reader: RunReader | None = None
    summary: RunSummary | None = None


@dataclass(frozen=True, slots=True)
class OpenedRun:
    """Holds a run for its page."""

    run: FoundRun
    page: RunPage
    is_read: bool
    log: str
    """The last lines of rank 0's output."""


@dataclass(slots=True)
class Board:
    """Answers the pages' questions about a folder of runs, one at a time."""

    folder: Path
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _entries: dict[Path, _Entry] = field(default_factory=dict)
    _opened: list[Path] = field(default_factory=list)

    def runs(self) -> list[RunSummary]:
        """Return the runs of the folder, the newest first; broken ones last."""
        with self._lock:
            look = look_into(self.folder)
            found = look.runs
            try:
                found = settle_all(found)
            except LaunchError:  # the queue's page says it
                pass
            until = time.monotonic() + _LIST_S
            known = [self._summary(run, until) for run in reversed(found)]
            there = {run.path for run in found}
            for path in [path for path in self._entries if path not in there and path not in self._opened]:
                del self._entries[path]
            return [
                *known,
                *(RunSummary(str(path.relative_to(self.folder)), why=why) for path, why in _hidden(look)),
            ]

    def open(self, keys: Sequence[str]) -> list[OpenedRun]:
        """Return runs for their page. Raises LaunchError for one that is not there or cannot be read."""
        with self._lock:
            found = [self._find(key) for key in keys]
            until = time.monotonic() + _PAGE_S
            return [self._open(run, until) for run in found]

    def shown_as(self, path: Path) -> str:
        """Return how addresses name a folder: from the folder of runs, from here, or by its whole path."""
        own = path.resolve()
        for above in (self.folder.resolve(), Path.cwd()):
            if own.is_relative_to(above) and own != above:
                return as_text(str(own.relative_to(above)))
        return as_text(str(own))

    def sweeps(self) -> list[str]:
        """Return the names of the sweeps, for addresses."""
        return [self.shown_as(path) for path in find_sweeps(self.folder)]

    def open_sweep(self, name: str) -> ShownSweep:
        """Return a sweep with what its trials have reported. Raises LaunchError."""
        with self._lock:
            for folder in find_sweeps(self.folder):
                if self.shown_as(folder) == name:
                    return open_trials_of(folder, name)
        raise LaunchError(f"there is no sweep {name!r}")

    # -- runs

    def _find(self, key: str) -> FoundRun:
        look = look_into(self.folder)
        for run in look.runs:
            if as_text(run.name) == key:
                return settle(run)
        for path, why in _hidden(look):
            if as_text(str(path.relative_to(self.folder))) == key:
                raise LaunchError(f"{key}: {why}")
        for path in self._elsewhere():
            if self.shown_as(path) == key and (known := run_folder.read(path)) is not None:
                return settle(FoundRun(key, path, known))
        raise LaunchError(f"there is no run {key!r} in {self.folder}")

    def _elsewhere(self) -> Iterator[Path]:
        """Yield the folders of the runs that the queue and the sweeps have."""
        yield from run_folders()
        for sweep in find_sweeps(self.folder):
            yield from (path.parent for path in sweep.resolve().glob("*/launcher.json"))

    def _entry(self, run: FoundRun) -> _Entry:
        entry = self._entries.get(run.path)
        if entry is None or entry.run_id != run.record.run_id:  # another run has begun in the folder
            entry = self._entries[run.path] = _Entry(run.record.run_id)
        return entry

    def _summary(self, run: FoundRun, until: float) -> RunSummary:
        entry = self._entry(run)
        try:
            signature = _signature(run)
            if entry.summary is None or entry.signature != signature:
                left = until - time.monotonic()
                if left <= 0:
                    return entry.summary or _summarise(run, RunProgress(), is_read=False)
                entry.reader = entry.reader or RunReader(run)
                is_read = entry.reader.advance(left)
                entry.signature = signature if is_read else None
                progress = entry.reader.progress
                entry.summary = _summarise(run, progress, is_read=is_read)
                if is_read and run.has_ended and run.path not in self._opened:
                    entry.reader = None
            elif entry.summary.state != run.state:
                known = entry.reader.progress if entry.reader is not None else None
                entry.summary = _summarise(run, known, entry.summary)
            return entry.summary
        except (OSError, ValueError, OverflowError, LaunchError) as error:
            # one run that cannot be read must not hide the others
            return RunSummary(run.name, why=str(error) or type(error).__name__, came=run.record.came)

    def _open(self, run: FoundRun, until: float) -> OpenedRun:
        entry = self._entry(run)
        self._opened = [*(path for path in self._opened if path != run.path), run.path]
        for path in self._opened[:-_OPENED]:
            if (old := self._entries.get(path)) is not None:
                old.reader = None
                old.signature = None
        self._opened = self._opened[-_OPENED:]
        try:
            if entry.reader is None:
                entry.reader = RunReader(run)
            is_read = entry.reader.advance(max(0.0, until - time.monotonic()))
            return OpenedRun(run, entry.reader.page(run), is_read, _last_lines(run.path))
        except (OSError, ValueError, OverflowError) as error:
            raise LaunchError(f"{run.name} cannot be read: {error}") from None


def _hidden(look: RunsOfFolder) -> list[tuple[Path, str]]:
    """Return the folders of the runs that cannot be shown, and why."""
    return [*((path, _UNREADABLE) for path in look.broken), *look.refused.items()]


def _signature(run: FoundRun) -> tuple[int, int]:
    try:
        found = os.stat(run.path / "events.jsonl")
    except FileNotFoundError:
        return 0, 0
    return found.st_mtime_ns, found.st_size


def _summarise(
    run: FoundRun,
    progress: RunProgress | None,
    before: RunSummary | None = None,
    *,
    is_read: bool = True,
) -> RunSummary:
    """Describe a run; ``before`` has what its events said where they are not in memory any more."""
    record = run.record
    about: dict[str, Any] = {
        "key": run.name,
        "state": run.state,
        "workers": record.world_size,
        "hosts": tuple(map(record.shown, record.hosts)),
        "came": record.came,
        "command": " ".join(record.command),
        "label": record.label,
    }
    time.localtime(record.came)  # raises for a time that no page can show
    if progress is None:
        assert before is not None
        return replace(before, **about)
    return RunSummary(
        **about,
        why=redact(progress.failure)[0],
        is_read=is_read,
        step=progress.step,
        steps=progress.steps,
        of_epoch=progress.of_epoch,
        left_s=progress.seconds_left() if run.state == "running" else None,
        losses=_thinned([y for _, y in progress.series["loss"].shown()] if "loss" in progress.series else []),
    )


def _thinned(values: Sequence[float]) -> tuple[float, ...]:
    """Return at most _SPARK_POINTS of the values, the last one among them."""
    if len(values) <= _SPARK_POINTS:
        return tuple(values)
    apart = (len(values) - 1) / (_SPARK_POINTS - 1)
    return tuple(values[round(index * apart)] for index in range(_SPARK_POINTS))


def _last_lines(run_dir: Path) -> str:
    """Return the last lines that rank 0 has printed, without secrets; "" where there is no log."""
    path = log_path(run_dir, 0)
    try:
        start = max(0, path.stat().st_size - _LOG_BYTES)
        data = b"".join(piece.data for piece in LogReader(path, start).read(_LOG_BYTES))
    except OSError:
        return ""
    lines = data.decode("utf-8", "replace").splitlines()
    whole = lines[1:] if start else lines  # the first one may have begun before
    return redact("\n".join(whole[-_LOG_LINES:]))[0]
