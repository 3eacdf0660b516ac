"""Notes that the run is asked to save and stop, by SIGUSR1, and by SIGTERM where the launcher says that there
is time.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

from .environment import read_environment
from .report import announce

REQUEUE_EXIT_CODE = 75
"""Tells the launcher "start me again" (EX_TEMPFAIL): the exit code of a process that has saved and ended
because it was asked to. The launcher has an equal constant.
"""
_requested = threading.Event()
_acts = threading.Event()
"""Set once something in this process saves when it is asked to: an engine with ``checkpoint.on_signal``, a
script that reads ``should_stop``, or a handler of the script.
"""


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
        elif signum == signal.SIGUSR1:
            act_on_request()


def act_on_request() -> None:
    """Note that something in this process saves when it is asked to. The launcher hears it from rank 0."""
    if not _acts.is_set():
        _acts.set()
        if read_environment().rank == 0:
            announce("save_asked", acts=True)


def _note(_signum: int, _frame: FrameType | None) -> None:
    _requested.set()
    os.environ["ZLAUNCH_STOP_ASKED"] = "1"
    if not _acts.is_set() and read_environment().rank == 0:
        announce("save_asked", acts=False)


def requested() -> bool:
    """Tell whether this process has been asked to save and stop."""
    return _requested.is_set()
