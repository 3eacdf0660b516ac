"""Notes that the run is asked to save and stop, by SIGUSR1, and by SIGTERM where the launcher says that there
is time; finds the folder to resume from.
"""

from __future__ import annotations

import glob
import os
import signal
import threading
from types import FrameType

from .environment import read_environment

REQUEUE_EXIT_CODE = 75
"""Tells the launcher "start me again" (EX_TEMPFAIL): the exit code of a process that has saved and ended
because it was asked to. The launcher has an equal constant.
"""
_requested = threading.Event()


def install() -> None:
    """Install the signal handlers. Without effect outside the main thread, where Python does not allow it."""
    environment = read_environment()
    if environment.stop_asked:
        _requested.set()
    if threading.current_thread() is not threading.main_thread():
        return
    signals = [signal.SIGUSR1, *([signal.SIGTERM] if environment.term_saves else [])]
    for signum in signals:
        present = signal.getsignal(signum)
        ours = getattr(present, "__name__", "") in ("_note", "_note_stop")
        if ours or present in (signal.SIG_DFL, None):  # the user's handlers stay
            signal.signal(signum, _note)


def _note(_signum: int, _frame: FrameType | None) -> None:
    _requested.set()
    os.environ["ZLAUNCH_STOP_ASKED"] = "1"


def resume_dir(default: str | None = None) -> str | None:
    """Return the folder that ``engine.load_checkpoint`` is to load from, or None for a new run.

    Under zlaunch: where this run had saved before it was restarted (``--max_restarts``), or before its SLURM
    job was requeued. ``default`` is for all other runs: a folder that is taken if it has a checkpoint.
    """
    told = read_environment().resume_dir
    if told is not None or default is None:
        return told
    folder = os.path.expanduser(default)
    tagged = os.path.join(glob.escape(folder), "*", "manifest.json")
    return folder if os.path.exists(os.path.join(folder, "latest")) or glob.glob(tagged) else None


def requested() -> bool:
    """Tell whether this process has been asked to save and stop."""
    return _requested.is_set()
