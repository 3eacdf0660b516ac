"""Follow a run's files and describe the run as a page: for `zlaunch report` and `zlaunch ui`."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zlaunch.supervisor import run_folder
from zlaunch.supervisor.found_runs import FoundRun
from zlaunch.supervisor.provenance import PROVENANCE
from zlaunch.supervisor.redact import redact
from zlaunch.supervisor.run_files import EventFile
from zlaunch.system.events import Event
from zlaunch.view.page import RunPage
from zlaunch.view.progress import RunProgress, span

_EVENTS_BETWEEN_LOOKS = 256
"""Events that are read between two looks at the clock."""


class RunReader:
    """Reads the events of a run, and later those that have come."""

    def __init__(self, run: FoundRun) -> None:
        self.progress = RunProgress(run.record.shown)
        self._events = EventFile(run.path / "events.jsonl")
        self._coming: Iterator[Event] | None = None
        self._kept: list[Event] = []

    def advance(self, seconds: float = math.inf) -> bool:
        """Read what has come, for at most ``seconds``; return whether all has been read. Raises OSError."""
        until = time.monotonic() + seconds
        coming = self._events.read() if self._coming is None else self._coming
        self._coming = None
        for count, event in enumerate(coming, 1):  # one by one: there may be millions
            self.progress.take(event)
            if event.get("type") in ("exception", "environment"):
                self._kept.append(event)
            if count % _EVENTS_BETWEEN_LOOKS == 0 and time.monotonic() >= until:
                self._coming = coming
                return False
        return True

    def page(self, run: FoundRun) -> RunPage:
        """Describe the run by what has been read; ``run`` is the run as it stands now."""
        content = run_folder.read_json(run.path / "config.effective.json").get("config")
        known = next((event for event in reversed(self._kept) if event.get("type") == "environment"), {})
        label = run.record.label
        return RunPage(
            f"{label} ({run.name})" if label else run.name,
            _facts(run, self.progress),
            self.progress,
            content if isinstance(content, dict) else {},
            _failures(self._kept, self.progress),
            {name: value for name, value in known.items() if name not in ("type", "rank", "time")},
            run.record.command,
            redact(self.progress.failure)[0],
        )


def read_failure(run: FoundRun) -> str:
    """Return a line about the first failure of the last attempt; empty where none is recorded."""
    reader = RunReader(run)
    reader.advance()
    return reader.page(run).failure


def _facts(run: FoundRun, progress: RunProgress) -> list[tuple[str, str]]:
    record = run.record
    end = record.ended or progress.last or record.started
    rows = [("name", record.label)] if record.label else []
    rows += [
        ("command", shlex.join(("zlaunch", *record.command))),
        ("hosts", ", ".join(map(record.shown, record.hosts))),
        ("ranks", str(record.world_size)),
        ("started", time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(progress.started or record.started))),
        ("state", f"{run.shown_state}, after {span(max(0.0, end - (progress.started or record.started)))}"),
    ]
    rows += _code(run_folder.read_json(run.path / PROVENANCE))
    if progress.step is not None:
        rows.append(("steps", f"{progress.step}" + (f" of {progress.steps}" if progress.steps else "")))
    if progress.checkpoints:
        rows.append(("last checkpoint", progress.checkpoints[-1][1]))
    return rows


def _code(provenance: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the commit and the seed of a run, as far as they are known."""
    git = provenance.get("git")
    rows = []
    if isinstance(git, dict) and git.get("commit"):
        branch = f" on {git['branch']}" if git.get("branch") else ""
        changes = ", with uncommitted changes" if git.get("dirty") else ""
        rows.append(("commit", f"{git['commit']}{branch}{changes}"))
    if provenance.get("seed") is not None:
        rows.append(("seed", str(provenance["seed"])))
    return rows


def _failures(events: Sequence[Event], progress: RunProgress) -> list[str]:
    """Return tracebacks, lost nodes and other errors."""
    found = [
        redact(
            f"rank {event.get('rank')} on {progress.shown(str(event.get('host')))}\n{event.get('traceback')}"
        )[0]
        for event in events
        if event.get("type") == "exception"
    ]
    told = tuple(f"rank {event.get('rank')}: " for event in events if event.get("type") == "exception")
    return found + [redact(text)[0] for text in progress.failures if not text.startswith(told)]
