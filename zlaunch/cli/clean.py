"""`zlaunch ps --clean`: remove what runs that have ended have left, and nothing else."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from zlaunch.runtime.trust import Folder
from zlaunch.supervisor import run_record
from zlaunch.supervisor.detach import CONSOLE_LOG
from zlaunch.supervisor.found_runs import FoundRun, own_pids
from zlaunch.supervisor.rank_logs import OLDER, TIMES
from zlaunch.supervisor.run_folder import is_locked
from zlaunch.supervisor.run_record import QUEUE_FOLDER

_OURS = (
    "launcher.json",
    "plan.json",
    "events.jsonl",
    "config.effective.json",
    "batches.json",
    "checkpoint.json",
    "provenance.json",
    "packages.txt",
    "git.diff",
    "script_copy*",
    *(f"logs/{folder}rank_*.log{older}" for folder in ("", f"{TIMES}/") for older in ("", OLDER)),
    *("logs/agent_*.log", "logs/error_*.json", CONSOLE_LOG, f"{QUEUE_FOLDER}/[0-9]*.*"),
)
"""What zlaunch writes into a run's folder; all else there is the user's. launcher.json goes last, so that a
folder that could not be emptied stays a run.
"""


def clean_up(runs: Sequence[FoundRun], refused: Mapping[Path, str], *, yes: bool) -> int:
    """List the runs that have ended, ask, and remove them; return the exit code. `refused` runs stay."""
    for path, reason in refused.items():
        print(f"{path}: stays: it {reason}")
    chosen = []
    for run in runs:
        why = _kept_because(run)
        if why is None:
            chosen.append(run)
            print(f"{run.path}: {run.state}, {_size(run.path)}, logs and all")
        elif run.state not in ("running", "queued"):
            print(f"{run.path}: {run.state}, stays: {why}")
    if not chosen:
        print("nothing to remove")
        return 0
    plural = "s" if len(chosen) > 1 else ""
    if not yes:
        if not sys.stdin.isatty():
            raise click.UsageError(f"--clean: add --yes to remove the {len(chosen)} run{plural} listed above")
        if not click.confirm(f"Remove the {len(chosen)} run{plural}?"):
            return 1
    for run in chosen:
        _remove(run)
    print(f"removed {len(chosen)} run{plural}")
    return 0


def _kept_because(run: FoundRun) -> str | None:
    """Return why a run must stay, or None."""
    if run.state == "queued":
        return "it is in the queue"
    if run.record.ended is None:
        if run.is_elsewhere:
            return f"only {run.record.host} can tell whether it has ended: run zlaunch ps --clean there"
        if run.state == "running":
            return "it is going on"
    if is_locked(run.path):
        return "a launch has just begun there"
    if alive := own_pids(run):
        return f"process {alive[0]} of it is still alive"
    job = run_record.read_json(run.path / run_record.CHECKPOINT).get("job")
    return f"SLURM job {job} goes on from it if it is requeued; otherwise remove it by hand" if job else None


def _ours(folder: Path) -> list[Path]:
    return [path for pattern in _OURS for path in folder.glob(pattern)]


def _size(folder: Path) -> str:
    size = float(sum(path.lstat().st_size for path in _ours(folder)))
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def _remove(run: FoundRun) -> None:
    """Remove our files, and the folders that are empty then. Raises click.UsageError."""
    now = run_record.read(run.path)
    if now is None or now.pid != run.record.pid or now.started != run.record.started:
        print(f"{run.path}: stays: another run has begun there")
        return
    try:
        with Folder(run.path) as folder_checked:
            ours = _ours(folder_checked.path)
            for path in sorted(ours, key=lambda path: path.name == "launcher.json"):
                path.unlink()
        above = run.path.absolute().parent
        group = (above,) if above.name == "runs" or above.name.startswith("slurm-") else ()
        latest = above / "latest"
        for folder in (
            run.path / "logs" / TIMES,
            run.path / "logs",
            run.path / QUEUE_FOLDER,
            run.path,
            *group,
        ):
            if folder == above and latest.is_symlink() and not latest.exists():
                latest.unlink()
            if folder.is_dir() and not folder.is_symlink() and not os.listdir(folder):
                folder.rmdir()
    except OSError as error:
        raise click.UsageError(f"--clean: {error.filename}: {error.strerror}") from None
    if run.path.is_dir():
        others = sorted(path.name for path in run.path.iterdir())
        print(f"{run.path}: {', '.join(others)} stay{'s' * (len(others) == 1)}: not zlaunch's")
