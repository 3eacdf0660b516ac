"""Collect the queue's jobs and the sweeps."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from zlaunch.queue.daemon import queue_folder, settle
from zlaunch.queue.store import Job, Store
from zlaunch.supervisor import run_folder
from zlaunch.supervisor.found_runs import FoundRun
from zlaunch.sweep.trials import SweepTrial, ranked, read_trials

SWEEPS = "sweeps"
"""Folder in which `zlaunch sweep` keeps sweeps."""
_ENDED = 20
"""Jobs that have ended and are shown."""


@dataclass(frozen=True, slots=True)
class ShownSweep:
    """Holds a sweep for its page: its trials, the best first."""

    name: str
    metric: str
    trials: list[SweepTrial]


def run_folders() -> list[Path]:
    """Return the folders of the queue's runs, the oldest first. Raises LaunchError."""
    return Store(queue_folder()).run_dirs()


def shown_jobs() -> list[Job]:
    """Return the jobs that wait and run, and below them the last ones that have ended. Raises LaunchError."""
    store = Store(queue_folder())
    ended: list[Job] = next(store.ended_pages(), [])
    return [*store.rows("waiting", "running"), *ended[:_ENDED]]


def find_sweeps(folder: Path) -> list[Path]:
    """Return the folders of sweeps: under `sweeps`, under ``folder``, and those of the queue's jobs."""
    found = [*Path(SWEEPS).glob("*/sweep.json"), *folder.glob("*/sweep.json"), folder / "sweep.json"]
    found += [path.parent / "sweep.json" for path in run_folders()]
    return sorted({path.parent.resolve() for path in found if os.path.isfile(path)})


def open_trials_of(folder: Path, name: str) -> ShownSweep:
    """Return the sweep in a folder with what its trials have reported. Raises LaunchError."""
    trials, goal = read_trials(folder, standing)
    for trial in trials:
        trial.read()
    return ShownSweep(name, trials[0].metric if trials else "metric", ranked(trials, goal))


def standing(folder: Path) -> str:
    """Return how a trial stands by its folder alone, in the words of `SweepTrial.standing`."""
    known = run_folder.read(folder)
    if known is None:
        return "new"
    state = settle(FoundRun(folder.name, folder, known)).state
    if state.startswith("on "):
        return "running"
    return "ended killed" if state in ("gone", "ended None") else state
